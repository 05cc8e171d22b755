"""A Slurm of three hosts on this machine: `h0` with slurmctld, from which jobs are submitted, and the nodes `h1` and `h2`.

Each host has a network, a host name and a /tmp of its own. They share the rest of the disk, as nodes share the home folders.
"""

import contextlib
import os
import secrets
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from vitline.infra.children import end_with_parent

from ..cluster import hosts
from ..eventually import eventually

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "nsenter", "unshare")
HOSTS = ("h0", "h1", "h2")
READY_S = 240.0

CONFIG = """
ClusterName=test
SlurmctldHost=h0({network}.1)
SlurmUser=root
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n.spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,batch_sched_delay=1
SlurmdTimeout=10
ReturnToService=2
MpiDefault=none
JobCompType=jobcomp/none
NodeName=h1 NodeAddr={network}.2 CPUs=2 RealMemory=4000
NodeName=h2 NodeAddr={network}.3 CPUs=2 RealMemory=4000
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not_here() -> str:
    """Why Slurm cannot be started here; empty if it can."""
    return hosts.why_not_here(PROGRAMS, "slurm-wlm, munge and iproute2")


class SlurmCluster:
    """Runs commands on its hosts."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.folder, self._stack, self._hosts = folder, stack, hosts.Hosts(folder, HOSTS)
        self._holders = dict[str, "subprocess.Popen[bytes]"]()
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}

    def start(self) -> None:
        for name in ("state", "munge"):
            (self.folder / name).mkdir(mode=0o700)
        (self.folder / "slurm.conf").write_text(CONFIG.format(folder=self.folder, network=hosts.NETWORK))
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # not used, but looked for
        self._stack.enter_context(self._hosts)
        for host in HOSTS:
            self._hold(host)
        key = self.folder / "munge/key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        files = {"socket": self.folder / "munge.socket", "key-file": key}
        files |= {f"{name}-file": self.folder / f"munge/{name}" for name in ("log", "pid", "seed")}
        self._keep("h0", "munged", "--foreground", "--force", *(f"--{name}={path}" for name, path in files.items()))
        eventually(files["socket"].exists, READY_S, "munged listens", 0.05)
        self._keep("h0", "slurmctld", "-D")
        for node in HOSTS[1:]:
            (self.folder / f"{node}.spool").mkdir()
            self._keep(node, "slurmd", "-D")
        idle = ["sinfo", "--noheader", "--format=%t %D"]
        eventually(lambda: self.on("h0", *idle).split() == ["idle", "2"], READY_S, "both nodes of Slurm are idle")

    def on(self, host: str, *command: str, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
        """What a command on a host prints. Raises AssertionError if it fails."""
        entered = self._entered(host, command, cwd or self.folder)
        done = subprocess.run(entered, env=self._env(env), capture_output=True, text=True)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout

    def job(self, job_id: str) -> dict[str, str]:
        """The fields of a job that `scontrol show job` knows."""
        words = self.on("h0", "scontrol", "--oneliner", "show", "job", job_id).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def pids(self, host: str) -> list[int]:
        """All processes on a host."""
        return [process.pid for process in self._hosts.processes(host)]

    def _env(self, env: Mapping[str, str] | None) -> dict[str, str]:
        here = dict(os.environ) if env is None else dict(env)
        return here | self.environment | {"PATH": f"{here.get('PATH', os.defpath)}:/usr/sbin:/sbin"}

    def _entered(self, host: str, command: tuple[str, ...], cwd: Path) -> list[str]:
        enter = ["nsenter", f"--target={self._holders[host].pid}", "--net", "--mount", "--uts"]
        return [*enter, "sh", "-c", 'cd "$0" && exec "$@"', str(cwd), *command]  # a folder as this host sees it

    def _keep(self, host: str, *command: str) -> None:
        """Runs a server on a host until the end."""
        with open(self.folder / f"{host}-{command[0]}.out", "wb") as output:
            process = subprocess.Popen(
                self._entered(host, command, self.folder),
                env=self._env(None),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                preexec_fn=end_with_parent,
            )
        self._stack.callback(_end, process)

    def _hold(self, host: str) -> None:
        own = self.folder / f"{host}.tmp"
        own.mkdir()
        lines = ["set -e"]
        if self.folder.is_relative_to("/tmp"):
            shared = own / self.folder.relative_to("/tmp")
            shared.mkdir(parents=True)
            lines += [f"mount --bind {self.folder} {shared}"]
        lines += [f"mount --rbind {own} /tmp", "echo ready", "exec sleep infinity"]
        command = self._hosts.entered(host, ["sh", "-c", "\n".join(lines)])
        holder = subprocess.Popen(command, stdout=subprocess.PIPE, preexec_fn=end_with_parent)
        self._stack.callback(_end, holder)
        assert holder.stdout is not None
        with holder.stdout:
            assert holder.stdout.readline() == b"ready\n"
        self._holders[host] = holder


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextlib.contextmanager
def slurm_cluster(folder: Path) -> Iterator[SlurmCluster]:
    """The cluster, until the context ends. Its files are in `folder`."""
    with contextlib.ExitStack() as stack:
        cluster = SlurmCluster(folder, stack)
        cluster.start()
        yield cluster
