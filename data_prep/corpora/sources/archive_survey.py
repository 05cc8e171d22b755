"""Layout and links of an archive of class folders, from its headers."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import TypedDict

from vitline.data_prep.config import ClassFolders
from vitline.data_prep.corpora.files.archive_members import Member, link_target
from vitline.data_prep.corpora.sources.folder_layout import FolderLayout, Links, beginnings, refusal_by_name
from vitline.data_prep.corpora.sources.folder_tree import FolderTree


class LayoutFile(TypedDict):
    """A `FolderLayout` as JSON."""

    splits: Mapping[str, str]
    wrapper: str
    container: str
    only_splits: bool
    description: str


class SurveyFile(TypedDict):
    """A `Survey` as JSON, kept in the work folder."""

    layout: LayoutFile
    targets: dict[str, str]
    existing: list[str]
    hard: list[str]
    damage: str
    damage_path: str


class Survey:
    """Layout and links of an archive, from one pass over its headers. Memory: folders and links."""

    def __init__(self, source: ClassFolders, uri: str) -> None:
        self.num_members, self.damage, self.damage_path = 0, "", ""
        self.layout, self.links = FolderLayout(), Links({})
        self._source, self._uri = source, uri

    def through(self, members: Iterable[Member]) -> Iterator[Member]:
        """Yields the same members; the survey is complete after the last one. Raises ValueError if the layout is not certain."""
        targets, hard, tree = dict[str, str](), list[str](), FolderTree()
        for member in members:
            if member.kind == "damage":
                self.damage, self.damage_path = (member.refused or ("", ""))[1], member.path
            else:
                self.num_members += 1
                if member.refused or refusal_by_name(member.path):
                    pass
                elif member.kind == "file":
                    tree.add(member.path)
                elif self._source.links != "skip" and member.kind != "folder" and (target := link_target(member)):
                    targets[member.path] = target
                    hard += [member.path] if member.kind == "hard_link" else []
            yield member
        self.links = Links(targets, hard=hard)
        tree.add_links(self.links)
        self.layout = tree.layout(self._source, self._uri)

    def find_targets(self, members: Iterable[Member]) -> None:
        """Find the link targets that exist, in a second pass, which is skipped if there are no links."""
        wanted = {self.links.resolved(link) for link in self.links.targets}
        if wanted:
            found = (name for member in members if not member.refused for name, _ in beginnings(member.path))
            self.links.existing = {name for name in found if name in wanted}

    def damaged_member(self) -> Member:
        return Member(self.damage_path, kind="damage", refused=("uncounted_loss", self.damage))

    def as_json(self) -> SurveyFile:
        return {
            "layout": LayoutFile(**asdict(self.layout)),
            "targets": self.links.targets,
            "existing": sorted(self.links.existing),
            "hard": sorted(self.links.hard),
            "damage": self.damage,
            "damage_path": self.damage_path,
        }

    @classmethod
    def from_json(cls, source: ClassFolders, uri: str, value: SurveyFile) -> "Survey":
        survey = cls(source, uri)
        survey.layout = FolderLayout(**value["layout"])
        survey.links = Links(value["targets"], value["existing"], value["hard"])
        survey.damage, survey.damage_path = value["damage"], value["damage_path"]
        return survey
