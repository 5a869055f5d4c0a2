"""Copies of the repository in which the ladder is driven as a user drives it."""

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
NOT_COPIED = shutil.ignore_patterns(".git", ".venv", ".snakemake", "results", "__pycache__", ".*_cache", ".hypothesis")
VERDICTS = ("results/tiny.pass", "results/int4_tiny.pass")  # one float bundle, and what is quantised from it


@dataclass
class Ladder:
    """One copy. `run` drives it; `ran` also tells which jobs ran, by the logs that they rewrote."""

    root: Path

    def snakemake(self, *arguments: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "snakemake", "--cores", "4", *arguments]
        return subprocess.run(command, cwd=self.root, capture_output=True, text=True)

    def run(self, *arguments: str) -> subprocess.CompletedProcess:
        done = self.snakemake(*arguments)
        assert done.returncode == 0, done.stderr
        return done

    def ran(self, *arguments: str) -> set[str]:
        """The jobs of a successful call, as `<rule>/<wildcards>`."""
        before = self.logs()
        self.run(*arguments)
        return {job for job, time in self.logs().items() if before.get(job) != time}

    def install(self) -> None:
        """This interpreter's packages stand in for those that `./ladder` would install."""
        venv = self.root / ".venv"
        (venv / "bin").mkdir(parents=True)
        (venv / "bin/python").symlink_to(sys.executable)
        (venv / "lib").symlink_to(Path(sys.prefix) / "lib")
        (venv / "pyvenv.cfg").write_text(f"home = {Path(sys.executable).resolve().parent}\n")
        stamp = "cat envs/requirements.txt envs/constraints.txt | sha256sum >.venv/requirements.sha256"
        subprocess.run(stamp, shell=True, cwd=self.root, check=True)

    def logs(self) -> dict[str, int]:
        folder = self.root / "results/logs"
        return {str(log.relative_to(folder).with_suffix("")): log.stat().st_mtime_ns for log in folder.rglob("*.log")}

    def read(self, file: str) -> str:
        return (self.root / file).read_text()

    def append(self, file: str, text: str) -> None:
        with open(self.root / file, "a") as f:
            f.write(text)

    def replace(self, file: str, old: str, new: str) -> None:
        """Edits the one place where `old` stands."""
        text = self.read(file)
        assert text.count(old) == 1, f"{file}: {text.count(old)} times {old!r}"
        (self.root / file).write_text(text.replace(old, new))

    def overlay(self, content: dict) -> list[str]:
        """The arguments that put `content` over config.yaml."""
        (self.root / "overlay.yaml").write_text(yaml.safe_dump(content))
        return ["--configfile", "overlay.yaml", "--"]


def copy_sources(root: Path) -> Ladder:
    shutil.copytree(ROOT, root, ignore=NOT_COPIED)
    return Ladder(root)
