"""Rewards pay for the answer on the last line, and for nothing else."""

import sys
from pathlib import Path

import pytest

from nybble.errors import ConfigError
from nybble.rl.tasks import TaskConfig, find_task
from nybble.rl.tasks.answer import Exact, final_answer
from nybble.rl.tasks.countdown import CountdownProblem, evaluate

EARNS_NOTHING = [
    "",
    "12",
    "7 + 5 = 12",
    "12\nAnswer: 13",
    "Answer: 12\nor so",
    "Answer: 12\nAnswer: 12",
    "Answer: 11\nAnswer: 12",
    "Answer: 12 or 13",
    "Answer: 12 13",
    "Answer: 13, not 12",
    "Answer:",
    "the Answer: 12",
    "answer: 12",
    "Answer: 12 Answer: 13",
    "Answer: \uff11\uff12",
    "Answer: 12.",
]


@pytest.mark.parametrize("text", EARNS_NOTHING)
def test_texts_without_one_clear_answer_earn_nothing(text: str) -> None:
    assert Exact(prompt="7+5=\n", answer="12").reward(text) == 0.0


@pytest.mark.parametrize(
    "text", ["Answer: 12", "Answer:12\n", "so 7 and 5\nmake\nAnswer: 12", "Answer: 12.0", "Answer: +12"]
)
def test_the_right_answer_earns_all(text: str) -> None:
    assert Exact(prompt="7+5=\n", answer="12").reward(text) == 1.0


def test_the_bare_answer_is_a_style_that_earns_nothing() -> None:
    problem = Exact(prompt="7+5=\n", answer="12")
    assert {style: problem.reward(text) for style, text in problem.solutions.items()} == {
        "direct": 1.0,
        "bare": 0.0,
    }
    worked = Exact(prompt="", answer="12", working="3*4\n")
    assert list(worked.solutions) == ["worked", "direct", "bare"]
    assert worked.reward(worked.solutions["worked"]) == 1.0


def test_words_count_but_white_space_does_not() -> None:
    problem = Exact(prompt="", answer="two  words")
    assert problem.reward("Answer: two words") == 1.0
    assert problem.reward("Answer: Two words") == 0.0
    assert final_answer("Answer: 1,234") == "1,234"
    assert Exact(prompt="", answer="1234").reward("Answer: 1,234") == 1.0
    assert Exact(prompt="", answer="1234").reward("Answer: 12,34") == 0.0


@pytest.mark.parametrize("name", ["arithmetic", "chain", "reverse", "countdown"])
@pytest.mark.parametrize("level", [1, 3, 6])
def test_a_problem_follows_from_its_index_and_its_solution_is_right(name: str, level: int) -> None:
    task, again = (find_task(TaskConfig(task=name, level=level)) for _ in range(2))
    other = find_task(TaskConfig(task=name, level=level, task_seed=1))
    prompts = set()
    for index in range(30):
        problem = task.problem(index)
        assert problem == again.problem(index)
        assert problem.reward(problem.solution) == 1.0
        assert problem.reward(problem.solution + "1") == 0.0
        prompts.add(problem.prompt)
    assert len(prompts) > 20
    assert prompts != {other.problem(index).prompt for index in range(30)}


def test_arithmetic_is_right() -> None:
    task = find_task(TaskConfig(task="arithmetic", level=6))
    for index in range(60):
        problem = task.problem(index)
        assert problem.answer == str(eval(problem.prompt.removesuffix("=\n").lstrip("0") or "0"))


def test_a_chain_is_worked_one_step_a_line() -> None:
    task = find_task(TaskConfig(task="chain", level=5))
    for index in range(60):
        problem = task.problem(index)
        *lines, answer = problem.solution.split("\n")
        assert [eval(line) for line in (problem.prompt.removesuffix("=\n"), *lines)] == [
            int(problem.answer)
        ] * (2 + index % 5)
        assert answer == f"Answer: {problem.answer}"
        assert [line.replace("-", "+").count("+") for line in lines] == list(range(1 + index % 5, 0, -1))


def test_countdown_takes_any_expression_of_the_numbers() -> None:
    problem = CountdownProblem(numbers=(3, 4, 4), target=16, expression="4*4")
    for right in ("4*4", "3*4+4", "4+3*4", "(4*4)"):
        assert problem.reward(f"Answer: {right}") == 1.0, right
    for wrong in ("16", "3*3+7", "4*4*1", "4**2", "4*4+4-4", "4/0", "abs(16)", "(", "4*" * 500 + "4", "16.0"):
        assert problem.reward(f"Answer: {wrong}") == 0.0, wrong
    assert evaluate("1/3*3")[0] == 1, "fractions are exact"


def test_tasks_of_reasoning_gym_by_name() -> None:
    pytest.importorskip("reasoning_gym", reason="needs the extra nybble[rl]")
    problem = find_task(TaskConfig(task="gsm-symbolic")).problem(3)
    assert problem.reward(problem.solution) == 1.0
    assert problem.reward(f"{problem.answer}\nAnswer: 0.5") == 0.0
    many = find_task(TaskConfig(task="gym-scored:countdown")).problem(3)
    assert many.reward(f"Answer: 0 + {many.answer}") in (0.0, 1.0)
    assert many.reward(many.solution) == 1.0
    with pytest.raises(ConfigError, match=r"no task 'gsm_symbolik'; near names are .*gsm_symbolic"):
        find_task(TaskConfig(task="gym:gsm_symbolik"))


def test_a_users_task_by_import_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_task.py").write_text(
        "from nybble.rl.tasks.arithmetic import Arithmetic as make\ndef none(seed, level): return 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find_task(TaskConfig(task="own_task:make", level=2)).problem(0).reward("") == 0.0
    for name, message in [
        ("own_task:none", "has no problem"),
        ("own_task:lost", "cannot be imported"),
        ("lost_module:make", "cannot be imported"),
        ("arithmetik", "did you mean arithmetic"),
    ]:
        with pytest.raises(ConfigError, match=message):
            find_task(TaskConfig(task=name))
    sys.modules.pop("own_task", None)
