"""A run is resumed as it was told: by its folder alone, and not otherwise without a word."""

import functools
import json
from pathlib import Path

import pytest
import yaml
from lives import settings, write_conversations

from drafttrain.__main__ import main
from drafttrain.config.compose import compose, typed
from drafttrain.config.overrides import UsageError
from drafttrain.config.resume import check_resumed
from drafttrain.config.sections import TrainConfig
from drafttrain.runtime.run_folder import load_config, write_config

TOLD = (
    *(
        "model=random",
        "data=jsonl",
        "data.path=talk.jsonl",
        "drafter=medusa",
        "drafter.num_heads=2",
    ),
    *("trainer=full", "trainer.lr=0.002", "hardware=cpu", "hardware.micro_batch=3", "eval=gsm8k"),
    *("run.seed=5", "run.name=mine"),
)


def train_config(*overrides: str) -> TrainConfig:
    return typed(compose("train", overrides), TrainConfig)


@functools.cache
def told_config() -> TrainConfig:
    return train_config(*TOLD)


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainConfig:
    """What a run with a checkpoint was told, in outputs/mine."""
    monkeypatch.chdir(tmp_path)
    config = told_config()
    Path("outputs/mine/checkpoints/step-000003").mkdir(parents=True)
    write_config(config, Path("outputs/mine/config.yaml"))
    return config


@pytest.mark.parametrize("where", ["run.dir=outputs/mine", "run.name=mine"])
def test_the_folder_alone_restores_every_setting(where: str, begun: TrainConfig) -> None:
    again = train_config(where, "run.resume=true")
    for section, told in vars(begun).items():
        if section != "run":
            assert getattr(again, section) == told
    assert (again.run.seed, again.run.name, again.run.dir) == (5, "mine", "outputs/mine")
    assert check_resumed(again) == []


def test_a_folder_that_moved_or_is_named_by_the_drafter_is_found(begun: TrainConfig) -> None:
    Path("outputs/mine").rename("outputs/medusa-random")
    again = train_config("drafter=medusa", "model=random", "run.resume=true", "drafter.num_heads=2")
    assert again.trainer.lr == 0.002
    assert (again.run.name, again.run.dir) == ("mine", "outputs/medusa-random")


def test_where_no_run_is_there_is_nothing_to_restore(begun: TrainConfig) -> None:
    assert train_config("run.name=other", "run.resume=true").drafter.name == "eagle3"
    assert train_config("run.name=mine").drafter.name == "eagle3", "without run.resume"
    assert train_config("run.name=mine", "run.resume=false").drafter.name == "eagle3"
    saved = load_config(Path("outputs/mine"))
    del saved["trainer"]  # of an evaluation without a run
    Path("outputs/mine/config.yaml").write_text(yaml.safe_dump(saved))
    assert train_config("run.name=mine", "run.resume=true").drafter.name == "eagle3"


def test_deepspeed_takes_adamw_unless_it_is_told_otherwise() -> None:
    assert train_config().optimizer.muon
    assert not train_config("deepspeed=zero2").optimizer.muon
    asked = train_config("deepspeed=zero2", "optimizer=muon")
    with pytest.raises(ValueError, match=r"optimizer must be adamw with deepspeed=zero2, got muon"):
        asked.optimizer.check(asked.deepspeed)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("trainer.lr=0.1", r"trainer\.lr must be 0\.002 to resume, as in \S+, got 0\.1, which"),
        ("hardware.train_dtype=bfloat16", r"hardware\.train_dtype must be \S+ to resume"),
        ("drafter.losses={forward_kl: 1.0}", r"drafter\.losses must be \{.*\} to resume"),
        ("drafter=eagle", r"drafter must be medusa to resume, .*, got eagle,"),
        ("data.path=other.jsonl", r"data\.path must be talk\.jsonl to resume"),
        ("model.seed=3", r"model\.seed must be 0 to resume"),
    ],
)
def test_what_changes_the_losses_is_refused_unless_it_is_allowed(
    given: str, said: str, begun: TrainConfig
) -> None:
    resumed = ("run.name=mine", "run.resume=true", given)
    with pytest.raises(ValueError, match=said) as refused:
        check_resumed(train_config(*resumed))
    allow = next(text for text in str(refused.value).split() if "allow_changes" in text)
    key = given.partition("=")[0]
    assert allow == f"run.allow_changes=[{key}]"
    (line,) = check_resumed(train_config(*resumed, allow))
    assert line.startswith(f"resumed with {key} ")
    assert line.endswith("as run.allow_changes allows")
    if key == "trainer.lr":
        (again,) = check_resumed(train_config(*resumed, "run.allow_changes=[trainer]"))
        assert again == line, "a whole section"


def test_features_of_another_store_change_the_losses(begun: TrainConfig) -> None:
    resumed = ("run.name=mine", "run.resume=true")
    stored = (*resumed, "features=stored", "features.dir=one")
    said = r"features must be online to resume, .*, got stored, which changes the losses"
    with pytest.raises(ValueError, match=said):
        check_resumed(train_config(*stored))
    allowed = train_config(*stored, "run.allow_changes=[features]")
    assert check_resumed(allowed) == [
        "resumed with features online -> stored, as run.allow_changes allows"
    ]
    write_config(allowed, Path("outputs/mine/config.yaml"))
    with pytest.raises(
        ValueError, match=r"features\.dir must be one to resume, .*, got two, which"
    ):
        check_resumed(train_config(*resumed, "features.dir=two"))
    (line,) = check_resumed(train_config(*resumed, "features.prefetch=0"))
    assert line == "resumed with features.prefetch 2 -> 0, which changes no loss of a step"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("trainer.tokens_per_step=7", r"trainer\.tokens_per_step must be \d+ to resume"),
        ("run.seed=6", r"run\.seed must be 5 to resume"),
        ("optimizer=adamw", r"optimizer\.muon must be true to resume"),
        ("trainer.ema_decay=0.9", r"trainer\.ema_decay must be 0\.0 to resume"),
    ],
)
def test_what_no_checkpoint_could_follow_is_not_offered(
    given: str, said: str, begun: TrainConfig
) -> None:
    resumed = ("run.name=mine", "run.resume=true", given, "trainer.beta1=0.5")
    section = given.partition("=")[0].split(".")[0]
    for allow in ("[]", f"[trainer,{section}]"):
        with pytest.raises(ValueError, match=said) as refused:
            check_resumed(train_config(*resumed, f"run.allow_changes={allow}"))
        assert "allow_changes" not in str(refused.value)
        assert "run.name=ANOTHER_NAME starts another run" in str(refused.value)


def test_a_name_that_is_no_key_allows_nothing(begun: TrainConfig) -> None:
    for resume in ("true", "false"):
        given = ("run.name=mine", f"run.resume={resume}", "run.allow_changes=[trainer.lrr]")
        with pytest.raises(ValueError, match=r"got trainer\.lrr; did you mean trainer\.lr\?"):
            check_resumed(train_config(*given))


@pytest.mark.parametrize("value", ["1", "yes", "on"])
def test_half_a_resume_is_refused(value: str, begun: TrainConfig) -> None:
    with pytest.raises(UsageError, match=f"run.resume must be true or false, got {value}"):
        train_config("run.name=mine", f"run.resume={value}")


def test_several_changes_are_named_together(begun: TrainConfig) -> None:
    given = ("trainer.lr=0.1", "data.path=more", "trainer.beta1=0.5")
    with pytest.raises(
        ValueError, match=r"data\.path must be talk.* got more, which changes the losses; "
    ):
        check_resumed(train_config("run.name=mine", "run.resume=true", *given))
    allow = "run.allow_changes=[data.path,trainer.lr]"
    with pytest.raises(ValueError, match=r"trainer\.beta1 must be .*=\[data\.path,trainer\.lr,tra"):
        check_resumed(train_config("run.name=mine", "run.resume=true", *given, allow))


def test_what_changes_no_loss_is_allowed_and_said_in_one_line(begun: TrainConfig) -> None:
    given = ("trainer.max_steps=9", "trainer.save_every=2", "hardware.micro_batch=1")
    given += ("hardware.ranks=2", "tracker=wandb", "model.name=other", "eval.depth=2")
    given += ("hardware.dtype=bfloat16",)
    (line,) = check_resumed(train_config("run.name=mine", "run.resume=true", *given))
    assert line.startswith("resumed with model.name random -> other, trainer.max_steps ")
    for told in ("hardware.micro_batch 3 -> 1", "hardware.ranks auto -> 2", "tracker "):
        assert told in line
    assert line.endswith(
        "which changes no loss of a step; the cosine schedule of trainer.lr ends with the last"
    )


def test_training_goes_on_by_its_folder_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    write_conversations(tmp_path / "data.jsonl")
    assert main(settings(run, tmp_path / "data.jsonl", "trainer.max_steps=2", "run.seed=3")) == 0
    before = load_config(run)
    assert main(["train", f"run.dir={run}", "run.resume=true"]) == 0
    assert "nothing is left to train" in capsys.readouterr().out
    assert load_config(run) == before
    assert main(["train", f"run.dir={run}", "run.resume=true", "trainer.max_steps=4"]) == 0
    said = "resumed with trainer.max_steps 2 -> 4, which changes no loss of a step"
    assert said in capsys.readouterr().out
    assert said in (run / "train.log").read_text()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "train/loss" in row] == [2, 4]
    before["trainer"]["max_steps"] = 4
    assert load_config(run) == before
    assert main(["train", f"run.dir={run}", "run.resume=true", "trainer.lr=1"]) != 0
    assert "trainer.lr must be" in capsys.readouterr().err
    assert load_config(run) == before, "what is refused leaves no trace"


def test_a_resume_that_is_refused_leaves_the_record_of_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, data = tmp_path / "run", tmp_path / "data.jsonl"
    write_conversations(data)
    assert main(settings(run, data, "trainer.max_steps=1")) == 0
    files = [path for path in sorted(run.rglob("*")) if path.is_file()]
    assert {"config.yaml", "provenance.json", "train.log"} <= {path.name for path in files}
    before, told = [path.read_bytes() for path in files], data.read_text()
    data.write_text(told + told.splitlines()[0].replace("0 plus", "99 plus") + "\n")
    again = ["train", f"run.dir={run}", "run.resume=true", "trainer.max_steps=2"]
    assert main(again) == 2
    assert "must have the data of its checkpoint" in capsys.readouterr().err
    assert main([*again, "model.seed=1", "run.allow_changes=[model]"]) == 2
    assert "must have the target of its checkpoint" in capsys.readouterr().err
    assert [path.read_bytes() for path in files] == before
    data.write_text(told)
    assert main(again) == 0
