"""What a user meets at the command line: help, mistakes answered in one line, errors that help."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from paths import PYTHONPATH, ROOT

import drafttrain.__main__ as cli
from drafttrain.commands.setup.training import gather
from drafttrain.config.compose import compose, typed
from drafttrain.config.groups import choices
from drafttrain.config.sections import COMMANDS, TrainConfig
from drafttrain.runtime.disk import DiskError
from drafttrain.runtime.lock import HeldError
from drafttrain.runtime.ranks import ALONE
from drafttrain.runtime.terminal import progress
from drafttrain.runtime.untrusted_input import UntrustedError

HEAVY = ("torch", "transformers", "deepspeed", "datasets", "wandb")


def python_m(*arguments: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run the command line as a user does; return what it said and the seconds it took."""
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "drafttrain", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
        check=False,
    )
    return done, time.monotonic() - start


def test_help_and_mistakes_are_answered_before_anything_heavy_is_imported() -> None:
    """Seconds depend on the machine, imports do not; both answers take 0.5 s on two idle cores."""
    program = (
        "import sys\n"
        "from drafttrain.__main__ import main\n"
        "codes = [main(['--help']), main(['train', '--help']), main(['train', 'drafter=eagel']),\n"
        "         main(['train', 'drafter.nm_heads=3']), main(['train', '--config']),\n"
        "         main(['train', 'trainer.lr=fast']), main(['train', 'trainer.max_steps=1e400']),\n"
        "         main(['train', 'eval.depth=null']), main(['train', 'model.path=']),\n"
        "         main(['train', 'trainer.lr=-1']), main(['train', 'hardware.micro_batch=0']),\n"
        "         main(['train', 'eval.depth=0']), main(['train', 'data.batch_size=-1'])]\n"
        f"print(codes, [name for name in {HEAVY} if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        check=True,
        timeout=60,
    )
    assert done.stdout.splitlines()[-1] == "[0, 0, 2, 2, 0, 2, 2, 2, 2, 2, 2, 2, 2] []"


def test_a_mistake_is_one_line_on_stderr_and_exit_code_2(tmp_path: Path) -> None:
    done, seconds = python_m("train", "drafter=eagel")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "error: drafter=eagel is not a choice; did you mean eagle? "
        f"choices: {', '.join(sorted(choices('drafter')))}\n"
    )
    assert seconds < 10, "0.5 s on an idle machine"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("trian", "no command is called trian; did you mean train? commands: train, evaluate"),
        ("train --hepl", "no option is called --hepl; did you mean --help? options: --help"),
        ("train --config-dir nowhere", "--config-dir must name a folder, got nowhere"),
        ("train eagle", "arguments must be section.key=value or section=choice, got 'eagle'"),
        ("train ~drafter", "arguments must be section.key=value or section=choice, got '~draf"),
        ("train modle=tiny", "no section is called modle; did you mean model? sections: run, mo"),
        ("train +modle.x=1", "no section is called modle; did you mean model?"),
        ("train hydra.run.dir=x", "no section is called hydra"),
        ("train drafter=eagel", "drafter=eagel is not a choice; did you mean eagle? choices:"),
        ("train drafter=null", "drafter=None is not a choice; choices: admitted"),
        ("train run=x", "run is a section: set its keys, as in run.dir=..."),
        ("train trainer.max_step=3", "trainer=default has no key max_step; did you mean max_ste"),
        ("train +drafter.x=3", "drafter=eagle3 has no key x; keys: "),
        ("train drafter.unroll.x=3", "drafter.unroll has no key x;"),
        ("train deepspeed.config.x=1", "deepspeed.config has no key x; keys: none; a key of D"),
        ("train trainer.lr=1e-3,1e-4", "one run has one value, got 'trainer.lr=1e-3,1e-4'"),
        ("train a~b=3", "'a~b' cannot be a key, in 'a~b=3'"),
        ("train drafter._target_=os.system", "drafter._target_ must name a class of drafttrain"),
        ("train drafter.unroll=four", "drafter.unroll must be an integer, got four"),
        ("train drafter.unroll=1.5", "drafter.unroll must be an integer, got 1.5"),
        ("train drafter.unroll=null", "drafter.unroll must be an integer, got null"),
        ("train drafter=medusa drafter.num_heads=0", "drafter.num_heads must be at least 1, got 0"),
        ("train trainer.lr=fast", "trainer.lr must be a number above 0, or auto, got fast"),
        ("train run.resume=maybe", "run.resume must be true or false, got maybe"),
        ("train drafter.layers=[a]", "drafter.layers must be a list of integers such as [1,2] or"),
        ("train drafter.layers=[1,2", "drafter.layers must be a list of integers such as [1,2] or"),
        (
            "train run.name=a/b",
            "run.name must be a name without slashes, on one line, of",
        ),
        (
            "train model.max_positions=null model=random",
            "model.max_positions must be an integer",
        ),
        ("train eval.task_by=kind", "eval.task_by must be one of task, category, got kind"),
        ("train run.seed=-1", "run.seed must be at least 0, got -1"),
        ("evaluate", "run.dir must be given: python -m drafttrain evaluate run.dir="),
        ("evaluate run.dir=nowhere", "run.dir must be the folder of a run, got nowhere, which"),
        (
            "train drafter=admitted",
            "drafter=admitted was trained elsewhere: measure it, python -m drafttrain eva",
        ),
        ("train drafter.path=x", "drafter=eagle3 has no key path; keys: "),
        ("evaluate drafter=admitted", "drafter.path must be given, as in drafter.path=VALUE"),
        ("evaluate drafter.path=x drafter=ngram", "drafter=ngram has no key path; keys: name, m"),
        ("export run.dir=tests", "run.dir must be the folder of a run, got tests, which"),
        ("train --help modle", "no section is called modle; did you mean model?"),
        (
            "train --help drafter=eaglee",
            "drafter=eaglee is not a choice; did you mean eagle? choices",
        ),
        (
            "train trainer=full drafter.lr=0.01",
            "drafter.lr=0.01 has no effect with trainer.lr=0.0001: give trainer.lr=0.01",
        ),
        (
            "train trainer.epochs=2",
            "trainer.epochs=2 has no effect with trainer.max_steps=300: give trainer.max_steps=",
        ),
    ],
)
def test_a_mistake_is_answered(
    arguments: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert cli.main(arguments.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: {said}")
    assert captured.err.count("\n") == 1


def test_a_folder_in_place_of_run_dir_is_understood(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["evaluate", str(tmp_path)]) == 2
    assert f"did you mean run.dir={tmp_path}?" in capsys.readouterr().err


def test_the_newest_run_is_the_example_when_run_dir_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for age, name in enumerate(("new", "old")):
        file = tmp_path / "outputs" / name / "config.yaml"
        file.parent.mkdir(parents=True)
        file.touch()
        os.utime(file, (1000 - age, 1000 - age))
    assert cli.main(["evaluate"]) == 2
    assert capsys.readouterr().err.endswith("evaluate run.dir=outputs/new\n")


def test_help_explains_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--help"], ["-h"]):
        assert cli.main(arguments) == 0
        text = capsys.readouterr().out
        for command in COMMANDS:
            assert f"\n  {command} " in text
        assert "python -m drafttrain train run.name=demo" in text


def test_help_of_a_command_shows_choices_and_keys_with_their_comments(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["train", "--help"]) == 0
    text = capsys.readouterr().out
    assert "  drafter=eagle3 * " in text
    assert "  model=tiny * " in text
    assert "  trainer.max_steps=" in text
    assert "Optimizer steps; auto:" in text
    assert max(len(line) for line in text.splitlines()) <= 100
    assert cli.main(["evaluate", "--help"]) == 0
    assert "  drafter=saved * " in capsys.readouterr().out


def test_help_of_a_section_shows_the_chosen_choice_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words in (["drafter", "drafter=medusa"], ["drafter=eagle", "drafter=medusa", "drafter"]):
        assert cli.main(["train", "--help", *words]) == 0
        titles = [line for line in capsys.readouterr().out.splitlines() if "keys of" in line]
        assert titles == ["keys of drafter=medusa:"]


def test_help_of_a_section_shows_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--help", "drafter=medusa", "run"]) == 0
    text = capsys.readouterr().out
    assert "  drafter.num_heads=" in text
    assert "  run.seed=0" in text


def test_config_is_printed_and_nothing_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--config", "run.name=x", "--local_rank=1"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("run:\n  name: x\n  dir: outputs/x\n")


def test_paths_need_no_quotes_for_hydra(capsys: pytest.CaptureFixture[str]) -> None:
    for path in ("~/models/x", "/data/a=b", "/it's here/x y", "C:\\x"):
        assert cli.main(["train", "-c", f"model.path={path}"]) == 0
        assert yaml.safe_load(capsys.readouterr().out)["model"]["path"] == path


def test_deepspeeds_launcher_is_understood() -> None:
    for extra in (["--local_rank=1"], ["--local_rank", "1"], ["--local-rank=0"]):
        request = cli.read(["train", *extra, "run.name=x"])
        assert request.overrides == ["run.name=x"]


def test_deepspeeds_own_keys_can_be_added(capsys: pytest.CaptureFixture[str]) -> None:
    key = "deepspeed.config.zero_optimization.overlap_comm"
    assert cli.main(["train", "-c", "deepspeed=zero1", f"+{key}=true"]) == 0
    config = yaml.safe_load(capsys.readouterr().out)["deepspeed"]["config"]
    assert config["zero_optimization"] == {"stage": 1, "overlap_comm": True}


def test_an_unreachable_hub_ends_with_the_way_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    talk = tmp_path / "talk.jsonl"
    answer = {"role": "assistant", "content": "Yes."}
    record = {"messages": [{"role": "user", "content": "So?"}, answer]}
    talk.write_text(f"{json.dumps(record)}\n" * 9)
    told = ["model=llama70b", "drafter=eagle", "hardware.check_fit=false"]
    told += ["data=jsonl", f"data.path={talk}", "data.holdout=1"]
    assert cli.main(["train", *told]) == 2
    captured = capsys.readouterr()
    assert "train eagle for llama70b" in captured.out
    assert captured.err.startswith("error: model=llama70b: cannot reach the Hugging Face Hub")
    assert "point model.path at a local directory that holds the model" in captured.err
    assert captured.err.count("\n") == 1
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [talk]


@pytest.fixture
def failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that runs a command that raises what it is given, `train` by default."""
    monkeypatch.chdir(tmp_path)

    def run(error: BaseException, code: str = "raise error", which: str = "train") -> int:
        def command(config: object) -> None:
            exec(code, {"error": error, "__name__": where})

        where = "drafttrain.somewhere" if isinstance(error, ValueError) else "torch.somewhere"
        monkeypatch.setattr(f"drafttrain.commands.{which}.{which}", command)
        drafter = ["drafter=ngram"] if which == "evaluate" else []
        return cli.main([which, f"run.dir={tmp_path}/run", *drafter])

    return run


def test_an_error_for_the_user_is_one_line(failing, capsys: pytest.CaptureFixture[str]) -> None:
    assert failing(ValueError("data.path must exist,\n got nothing")) == 2
    assert capsys.readouterr().err == "error: data.path must exist, got nothing\n"


def test_an_unforeseen_error_leaves_its_traceback_in_a_file(
    failing, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    assert failing(KeyError("lost")) == 1
    said = capsys.readouterr().err
    log = tmp_path / "run" / "error.log"
    assert said == (
        f"error: KeyError: 'lost' (the traceback is in {log}; DRAFTTRAIN_DEBUG=1 shows it here)\n"
    )
    assert "Traceback" in log.read_text()
    assert f"python -m drafttrain train run.dir={tmp_path}/run" in log.read_text()


def test_a_library_s_value_error_is_not_taken_for_the_users(
    failing, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert failing(KeyError(), code="import json; json.loads('{')") == 1
    assert "the traceback is in drafttrain_error.log" in capsys.readouterr().err
    assert (tmp_path / "drafttrain_error.log").is_file()


def test_debug_shows_the_traceback(failing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTTRAIN_DEBUG", "1")
    with pytest.raises(KeyError):
        failing(KeyError("lost"))


@pytest.mark.parametrize(
    ("command", "how"),
    [
        ("train", "; the same command with run.resume=true resumes"),
        ("evaluate", "; the same command resumes from what it measured"),
    ],
)
def test_interruption_says_how_to_go_on(
    command: str, how: str, failing, capsys: pytest.CaptureFixture[str]
) -> None:
    assert failing(KeyboardInterrupt(), which=command) == 130
    assert capsys.readouterr().err == f"interrupted{how}\n"


@pytest.mark.parametrize(
    ("number", "told", "code"),
    [(signal.SIGINT, "interrupted", 130), (signal.SIGTERM, "stopped by SIGTERM", 143)],
)
def test_a_measurement_that_is_asked_to_end_says_how_to_go_on(
    number: int, told: str, code: int, failing, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = f"import os; os.kill(os.getpid(), {int(number)}); raise error"
    assert failing(KeyError("went on"), asked, which="evaluate") == code
    said = capsys.readouterr().err
    assert said == f"{told}; the same command resumes from what it measured\n"


@pytest.mark.parametrize("folder", ["x" * 300, "/proc/x", "a\0b"])
def test_to_explain_an_error_does_not_fail(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "drafttrain_error.log").mkdir()  # nor can the traceback be written
    said = cli._explain(KeyError("lo\x1b[31mst"), Path(folder), ["train"])
    assert said.startswith("KeyError: 'lo\\x1b[31mst' (drafttrain_error.log could not be written")


def test_a_bare_key_is_answered_with_its_section(capsys: pytest.CaptureFixture[str]) -> None:
    for typed_, meant in (
        ("lr=1e-4", "trainer.lr=1e-4"),
        ("max_steps=3", "trainer.max_steps=3"),
        ("batch_size=8", "hardware.micro_batch=8 or trainer.tokens_per_step=8"),
        ("seed=1", "run.seed=1"),
        ("epochs=3", "trainer.epochs=3"),
    ):
        assert cli.main(["train", typed_]) == 2
        assert f"; did you mean {meant}" in capsys.readouterr().err
    assert cli.main(["generate"]) == 2
    assert "did you mean" not in capsys.readouterr().err


def test_a_launchers_variable_that_is_no_number_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "x")
    assert cli.main(["train"]) == 2
    assert capsys.readouterr().err.startswith("error: RANK must be a number, got 'x'; unset it")


def test_what_the_machine_failed_in_has_another_status(failing) -> None:
    assert failing(DiskError("a could not be written")) == 1
    assert failing(HeldError("run.dir is held by another process")) == 1
    assert failing(UntrustedError("a must be valid JSON")) == 2


def test_running_out_of_memory_names_the_knob(failing, capsys: pytest.CaptureFixture[str]) -> None:
    class OutOfMemoryError(RuntimeError):
        pass

    class AcceleratorError(RuntimeError):
        pass

    for kind in (OutOfMemoryError, AcceleratorError):
        assert failing(kind("CUDA error: out of memory")) == 1
        assert "lower hardware.micro_batch" in capsys.readouterr().err
    assert failing(AcceleratorError("CUDA error: an illegal memory access")) == 1
    assert "lower hardware.micro_batch" not in capsys.readouterr().err


def test_a_log_gets_the_last_line_of_a_progress_once(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("writing", 4) as tick:
        tick(4, "9 tokens/s")
        tick(0)
    assert capsys.readouterr().out == "writing 4/4 0:00 left 0:00 9 tokens/s\n"


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (["data.num_conversations=8", "data.holdout=8"], "data.holdout must be less than the 8"),
        (["data=jsonl", "data.path=nowhere.jsonl"], "data.path must name existing files"),
    ],
)
def test_data_that_cannot_do_are_refused_before_a_target_is_loaded(
    told: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("drafttrain.commands.setup.training.open_features")
    config = typed(compose("train", told), TrainConfig)
    with pytest.raises(ValueError, match=said):
        gather(config, True, torch.float32, ALONE, None, lambda line: None)


@pytest.mark.parametrize(
    "told",
    [
        ["train", "run.dir=FILE/run"],
        ["capture", "store.dir=FILE/store"],
        ["regenerate", "data=jsonl", "data.path=FILE", "regenerate.out=FILE/out.jsonl"],
        ["plan", "hardware=cpu", "plan.dir=FILE/plan"],
    ],
    ids=lambda told: told[0],
)
def test_a_place_that_cannot_be_written_is_named_before_the_work(
    told: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a file"
    file.touch()
    assert cli.main([text.replace("FILE", str(file)) for text in told]) == 2
    text = capsys.readouterr().err
    assert f"must lie where files can be written, got {file}" in text
    assert f": {file} is no folder; name another place\n" in text


def test_a_run_is_no_place_for_stored_features(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").touch()
    assert cli.main(["capture", f"store.dir={tmp_path}"]) == 2
    assert f"a folder of its own, got {tmp_path}, which holds a run" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["config.yaml"]


def test_an_ascii_locale_is_no_obstacle_to_paths_in_utf_8(tmp_path: Path) -> None:
    place = tmp_path / "données_日本.jsonl"
    command = [sys.executable, "-m", "drafttrain", "train", "data=jsonl", f"data.path={place}"]
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONPATH": PYTHONPATH}
    done = subprocess.run(
        [*command, f"run.dir={tmp_path / 'essai_é'}"],
        env=environment, capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert str(place) in done.stderr.decode()
