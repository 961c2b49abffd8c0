"""Settings: what a file may say, what it may not, and that the resolved file means the same run."""

from pathlib import Path

import pytest

from nybble.errors import ConfigError
from nybble.pretrain.config import OptimiserConfig, PretrainConfig, ScheduleConfig
from nybble.pretrain.configfile import dump, flatten, load_toml, merge


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


def test_the_written_file_reads_back_as_the_same_settings(tmp_path: Path) -> None:
    config = PretrainConfig(
        preset="tiny",
        out=Path("runs/x"),
        seed=3,
        optimiser=OptimiserConfig(lr=1 / 3, optimiser="muon"),
        schedule=ScheduleConfig(steps=7),
    )
    assert load_toml(write(tmp_path, dump(config)), PretrainConfig()) == config


def test_a_file_changes_what_it_names_and_nothing_else(tmp_path: Path) -> None:
    base = PretrainConfig(preset="tiny", seed=5)
    config = load_toml(write(tmp_path, 'recipe = "bf16"\n[optimiser]\nlr = 1\n'), base)
    assert (config.recipe, config.optimiser.lr, config.seed) == ("bf16", 1.0, 5)
    assert isinstance(config.optimiser.lr, float)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sed = 1", "unknown key 'sed'; did you mean seed"),
        ("lr = 1", r"unknown key 'lr'; did you mean optimiser\.lr"),
        ("[optimiser]\nlearning = 1", r"unknown key 'optimiser\.learning'; known keys here: optimiser, lr"),
        ("seed = 'x'", "seed is 'x', but must be of type int"),
        ("compile = 1", "compile is 1, but must be of type bool"),
        ("seed = true", "seed is True, but must be of type int"),
        ("optimiser = 3", r"optimiser is a section, so write \[optimiser\]"),
        ("[optimiser]\noptimiser = 'adam'", "must be one of adamw, muon; did you mean adamw"),
        ("[optimiser]\nlr = -1", "lr is -1.0; it must be above 0"),
        ("[schedule]\ndecay = 2", "decay is 2.0; it is a fraction"),
        (
            "[parallel]\nexchange_limit = inf",
            r"exchange_limit is inf s; it must be above 0 and at most 1e\+09",
        ),
        ("seed = ", "not valid TOML"),
    ],
)
def test_a_bad_file_names_itself_the_key_and_the_fix(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        load_toml(write(tmp_path, text), PretrainConfig())
    assert "run.toml" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml: no such settings file"):
        load_toml(tmp_path / "absent.toml", PretrainConfig())


def test_flatten_gives_dotted_names() -> None:
    flat = flatten(merge(PretrainConfig(), {"batch": {"batch": 3}}, "test"))
    assert flat["batch.batch"] == 3
    assert flat["preset"] == ""


def test_every_setting_has_a_name_of_its_own() -> None:
    """Flags carry no section, so two sections must not share a name."""
    leaves = [name.rpartition(".")[2] for name in flatten(PretrainConfig())]
    assert len(leaves) == len(set(leaves))


def test_the_run_folder_has_a_default() -> None:
    assert PretrainConfig(preset="tiny", recipe="a/b.toml").run_folder == Path("runs/tiny-b")
