"""Where links lead that many other links lie before."""

from vitline.data_prep.sources.folder_layout import Links


class CountingDict(dict):
    """Counts how often a link is looked for."""

    num_looks = 0

    def __contains__(self, key):
        self.num_looks += 1
        return super().__contains__(key)


def test_each_link_of_a_chain_is_followed_once():
    targets = CountingDict({f"l{i:05d}": f"l{i + 1:05d}" for i in range(5000)})
    links = Links(targets)
    assert targets.num_looks < 10 * len(targets)
    assert links.resolved("l04960") == "l05000"
    assert links.resolved("l04959") is None  # 41 links
    assert links.names_of("l05000").paths[:2] == ["l05000", "l04960"]


def test_links_through_links_to_folders():
    links = Links({"a/to": "b", "b/on": "c", "x": "a/to/on/1.jpg", "y": "x", "a/to/z": "elsewhere"})
    assert {link: links.resolved(link) for link in links.targets} == {
        "a/to": "b",
        "b/on": "c",
        "x": "c/1.jpg",
        "y": "c/1.jpg",
        "a/to/z": "b/z",  # below a link, which comes first
    }


def test_paths_do_not_grow_link_by_link():
    """Links through links, each adding a long name: no file can have such a path, and keeping 200,000 would take 32 GB."""
    targets = {"l00": "cat", **{f"l{i:02d}": f"l{i - 1:02d}/{'x' * 3000}" for i in range(1, 30)}}
    links = Links(targets)
    assert [link for link in targets if links.resolved(link) is not None] == ["l00", "l01"]
