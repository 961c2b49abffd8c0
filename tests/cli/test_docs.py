"""What README and docs cite is there: files of the repository, verbs, and their flags."""

import re
from pathlib import Path

import pytest

from nybble import cli

ROOT = Path(__file__).parents[2]
DOCS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
BASES = (ROOT, ROOT / "src", ROOT / "src/nybble", ROOT / "docs", ROOT / "docs/results", ROOT / "benchmarks")
"""What a cited path may be relative to."""
ROOMS = [path.name for base in BASES[:3] for path in base.iterdir() if path.is_dir()]
OF_A_RUN = re.compile(
    r"(.*/)?((config|recipe)\.toml|metrics\.jsonl|runs\.jsonl|report\.md|table\.csv|compare\.png"
    r"|rl\.png)|rollouts/.*|(data|runs)/.*"
)
"""Files that commands write."""


def cited(text: str) -> list[str]:
    """Paths between backquotes and in links: with a folder of ours, or with the suffix of a file of ours."""
    words = [w.strip(",;:()") for span in re.findall(r"`([^`\n]+)`", text) for w in span.split()]
    words += re.findall(r"\]\(([^)#:]+)\)", text)
    shape = re.compile(rf"(?:{'|'.join(ROOMS)})/[\w./*-]+|[\w/.*-]+\.(?:py|toml|md|png|jsonl|csv|npz)")
    return [word for word in words if shape.fullmatch(word) and not OF_A_RUN.fullmatch(word)]


@pytest.mark.parametrize("doc", DOCS, ids=lambda doc: doc.name)
def test_every_path_that_a_document_cites_is_there(doc: Path) -> None:
    found = cited(doc.read_text(encoding="utf-8"))
    assert not [path for path in found if not any(any(base.glob(path)) for base in BASES)]


def test_paths_are_found_in_text() -> None:
    text = "`make bench` and `python benchmarks/gone.py --x`, `kernels/cpu`; ![a](docs/gone.png), `runs/demo`"
    assert cited(text) == ["benchmarks/gone.py", "kernels/cpu", "docs/gone.png"]


def test_every_verb_and_flag_of_a_cited_command_exists(capsys: pytest.CaptureFixture[str]) -> None:
    known: dict[str, str] = {}
    for doc in DOCS:
        text = doc.read_text(encoding="utf-8").replace("\\\n", " ")
        for line in re.findall(r"(?:`|^|-m )nybble ([^`\n]+)", text, flags=re.MULTILINE):
            verb, *words = line.partition("#")[0].split()
            if verb not in cli.VERBS:
                assert verb in ("VERB", "--help", "--version"), f"{doc.name}: nybble {line}"
                continue
            if verb not in known:
                with pytest.raises(SystemExit):
                    cli.main([verb, "--help"])
                known[verb] = capsys.readouterr().out
            for word in words:
                flag = word.partition("=")[0]
                if re.fullmatch(r"--[a-z-]+", flag):
                    positive = flag.replace("--no-", "--")
                    assert re.search(rf"{flag}\b|{positive}\b", known[verb]), f"{doc.name}: nybble {line}"
