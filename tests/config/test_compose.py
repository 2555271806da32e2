"""conf/ composes, types, documents itself, and says which data a target is trained on."""

import re
import shlex
import sys
from dataclasses import fields, replace
from pathlib import Path

import hydra
import pytest
import yaml
from composed import ComposedOnce
from hydra.errors import HydraException
from omegaconf import OmegaConf
from pairs import dealt
from paths import ROOT

from drafttrain.__main__ import PLACES
from drafttrain.commands.setup.target_and_drafter import record_evaluation
from drafttrain.config.compose import compose, load_choice, recorded, typed
from drafttrain.config.groups import (
    bases,
    choices,
    command_groups,
    conf_dir,
    content_of,
    own_choices,
    told_target,
)
from drafttrain.config.help import EXAMPLES, MOST_USED, documented, headline
from drafttrain.config.overrides import UsageError
from drafttrain.config.sections import COMMANDS, SECTIONS, EvaluateConfig, TrainConfig
from drafttrain.runtime.run_folder import RunConfig, check_run_folder, load_config, write_config

GOLDEN = ROOT / "tests" / "golden" / "config_train.yaml"
YAML = sorted(conf_dir().rglob("*.yaml"))
GROUPS = {
    group: sorted(choices(group))
    for group in SECTIONS
    if choices(group) and any(group in command_groups(command) for command in COMMANDS)
}
# What a choice cannot know.
MUST_GIVE = {
    "data=jsonl": "data.path=talk.jsonl",
    "data=hub": "data.repo=owner/name",
    "eval=spec_bench": "eval.prompts=question.jsonl",
    "drafter=admitted": "drafter.path=eagle3",
    "drafter=ensemble": "drafter.members=[outputs/demo,ngram]",
    "features=stored": "features.dir=store",
}


def overrides_with(group: str, choice: str) -> list[str]:
    override = f"{group}={choice}"
    return [override, MUST_GIVE[override]] if override in MUST_GIVE else [override]


@pytest.fixture
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run as `train` records it when told nothing."""
    monkeypatch.chdir(tmp_path)  # the repository may have an outputs/selfgen, of `make demo`
    config = typed(compose("train", [f"run.dir={tmp_path}"]), TrainConfig)
    write_config(config, tmp_path / "config.yaml")
    return tmp_path


@pytest.mark.parametrize("row", range(max(len(names) for names in GROUPS.values())))
def test_every_choice_of_every_group_composes_and_types(row: int) -> None:
    """One composition takes the row-th choice of all groups: as few as cover every choice."""
    wanted = {group: names[row] for group, names in GROUPS.items() if row < len(names)}
    others = {group: wanted.pop(group) for group in ("chat", "export", "tune") if group in wanted}
    if wanted.get("drafter") == "admitted":  # trained elsewhere: not for `train`
        drafter = wanted.pop("drafter")
        alone = typed(compose("evaluate", overrides_with("drafter", drafter)), EvaluateConfig)
        assert alone.drafter.name == drafter
    overrides = [text for group, name in wanted.items() for text in overrides_with(group, name)]
    config = typed(compose("train", overrides), TrainConfig)
    for group, name in wanted.items():
        assert getattr(config, group).name == name, "a file's stem is the name it gives"
    for group, name in others.items():  # of other commands
        assert load_choice(group, name).name == name


@pytest.mark.parametrize("file", YAML, ids=lambda file: str(file.relative_to(conf_dir())))
def test_yaml_documents_itself(file: Path) -> None:
    text = file.read_text()
    assert headline(file), "the first line says what the choice is for"
    assert headline(file).endswith("."), "the first comment is a sentence"
    for key, (comment, _) in documented(file).items():
        assert comment, f"{key} needs a comment above"
    assert not [line for line in text.splitlines() if " #" in line.split("'")[0].lstrip(" #")], (
        "comments stand above, not behind"
    )
    assert file.stem == file.stem.lower()
    assert file.stem.isidentifier()
    assert text.endswith("\n")
    assert "\t" not in text


@pytest.mark.parametrize("group", GROUPS)
def test_choices_set_each_field_of_their_class_once_and_nothing_else(group: str) -> None:
    for name, file in choices(group).items():
        kind = class_of(group, content_of(group, name).get("_target_"))
        keys = set(content_of(group, name)) - {"_target_"}
        # Only what is trained has a learning rate.
        optional = set() if getattr(kind, "trainable", True) else {"lr"}
        assert keys == {field.name for field in fields(kind)} - optional, name
        assert set(documented(file)) >= keys, name


@pytest.mark.parametrize("group", GROUPS)
def test_a_choice_that_builds_on_another_says_only_what_differs(group: str) -> None:
    for name, file in choices(group).items():
        raw = yaml.safe_load(file.read_text())
        for base in bases(raw):
            below = content_of(group, base)
            assert not [key for key, value in raw.items() if (key, value) in below.items()], name


@pytest.mark.parametrize("name", [name for name in choices("drafter") if name != "admitted"])
def test_what_a_choice_sets_is_what_hydra_composes(name: str) -> None:
    """Hydra joins a dict with that of the choice built on: the losses of both would count."""
    told = overrides_with("drafter", name)
    composed = OmegaConf.to_container(compose("plan", told).drafter)
    given = {text.partition("=")[0].removeprefix("drafter.") for text in told}
    expected = content_of("drafter", name)
    assert all(composed[key] == value for key, value in expected.items() if key not in given)


def test_tests_compose_what_hydra_composes(tmp_path: Path) -> None:
    """The quick composition of tests/conftest.py beside what it stands for."""
    quick = hydra.compose
    assert isinstance(quick, ComposedOnce)
    dicts = ["data.template_kwargs=null", "data.template_kwargs={a: 1}"]
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        for head, told in (
            ("train", []),
            ("train", ["drafter=medusa", "trainer.lr=${oc.env:HOME}", "run.dir=x"]),
            ("train", ["trainer.max_steps=7", "+experiment=demo", *dicts]),
            ("plan", ["drafter=dflash", "hardware=h100x8", "drafter.layers=[1, 2]"]),
            ("evaluate_without_run", ["drafter=ngram", "eval.depth=3"]),
        ):
            once, whole = quick(head, told), quick.compose(head, told)
            assert OmegaConf.to_yaml(once) == OmegaConf.to_yaml(whole)
            assert OmegaConf.is_struct(once) == OmegaConf.is_struct(whole)
        with pytest.raises(HydraException, match=r"Could not override 'trainer\.none'"):
            quick("train", ["trainer.none=1"])
    for length in (77, 78):  # a run that was trained anew has another config.yaml
        told = [f"run.dir={tmp_path}", f"data.max_length={length}"]
        write_config(typed(compose("train", told), TrainConfig), tmp_path / "config.yaml")
        assert compose("evaluate", [f"run.dir={tmp_path}"]).data.max_length == length


def class_of(group: str, target: str | None) -> type:
    import importlib

    module, _, name = (target or SECTIONS[group]).rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize(
    ("name", "other"),
    dealt(list(choices("experiment")), [("plan", ""), ("capture", "store.dir=store")]),
)
def test_an_experiment_composes_and_types(name: str, other: tuple[str, str]) -> None:
    for command, *told in (("train",), [text for text in other if text]):
        config = typed(compose(command, [f"+experiment={name}", *told]), COMMANDS[command])
        for section, values in content_of("experiment", name).items():
            for key, value in values.items() if section != "defaults" else ():
                if hasattr(config, section) and "$" not in str(value):
                    expected = "store" if f"{section}.{key}" == "store.dir" else value
                    assert getattr(getattr(config, section), key) == expected


def test_what_is_typed_wins_over_an_experiment() -> None:
    config = compose("train", ["trainer.max_steps=7", "+experiment=smoke", "drafter=eagle"])
    assert (config.trainer.max_steps, config.drafter.name) == (7, "eagle")
    assert (config.hardware.name, config.trainer.save_every) == ("cpu", 2)


def test_a_drafter_of_ones_own_is_named_after_its_file(tmp_path: Path) -> None:
    (tmp_path / "drafter").mkdir()
    file = tmp_path / "drafter" / "mine.yaml"
    with own_choices(tmp_path):
        for text, named in (("name: other\n", "other"), ("", "medusa")):
            file.write_text(f"defaults: [medusa]\n{text}")
            with pytest.raises(
                UsageError, match=rf"mine\.yaml must say `name: mine`.* got {named}"
            ):
                compose("train", ["drafter=mine"])
        file.write_text("defaults: [medusa]\nname: mine\n")
        assert compose("train", ["drafter=mine"]).drafter.name == "mine"


def test_a_group_of_ones_own_sets_keys_of_any_section(tmp_path: Path) -> None:
    (tmp_path / "ablation").mkdir()
    text = "# @package _global_\n# Mine.\ndefaults:\n  - override /drafter: medusa\n"
    (tmp_path / "ablation" / "wide.yaml").write_text(f"{text}trainer:\n  lr: 0.5\n")
    with own_choices(tmp_path):
        config = compose("train", ["+ablation=wide"])
        assert (config.drafter.name, config.trainer.lr) == ("medusa", 0.5)
        with pytest.raises(ValueError, match=r"ablation=wid is not a choice; did you mean wide\?"):
            compose("train", ["+ablation=wid"])
        with pytest.raises(ValueError, match=r"takes a plus, as in \+ablation=wide"):
            compose("train", ["ablation=wide"])
    with pytest.raises(ValueError, match="no section is called ablation"):
        compose("train", ["+ablation=wide"])


def test_an_own_choice_builds_on_one_of_ours(tmp_path: Path) -> None:
    (tmp_path / "drafter").mkdir()
    text = "# Mine.\ndefaults:\n  - eagle3\n  - _self_\n\nname: mine\nunroll: 5\n"
    (tmp_path / "drafter" / "mine.yaml").write_text(text)
    with own_choices(tmp_path):
        config = compose("train", ["drafter=mine"])
        assert (config.drafter.unroll, config.drafter.depth_decay) == (5, 0.8)
        assert load_choice("drafter", "mine").unroll == 5
        told = documented(tmp_path / "drafter" / "mine.yaml")
    assert told["unroll"][1] == "5"
    assert told["unroll"][0].startswith("Depths that training unrolls")


def test_a_dict_replaces_the_one_before_it() -> None:
    losses = "drafter.losses={forward_kl: 0.5}"
    assert compose("train", [losses]).drafter.losses == {"forward_kl": 0.5}
    later = compose("train", [losses, "drafter.losses.forward_kl=2"])
    assert later.drafter.losses == {"forward_kl": 2}
    shape = compose("train", ["model.shape={hidden_size: 8}", "model=llama8b"]).model.shape
    assert shape == {"hidden_size": 8}


def test_a_field_that_yaml_lacks_or_invents_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "drafter").mkdir()
    own = tmp_path / "drafter" / "mine.yaml"
    own.write_text("# Mine.\n_target_: drafttrain.drafters.ngram.NgramConfig\nname: mine\n")
    with (
        own_choices(tmp_path),
        pytest.raises(ValueError, match=r"drafter\.max_ngram must be given"),
    ):
        typed(compose("train", ["drafter=mine"]), TrainConfig)
    own.write_text(own.read_text() + "max_ngram: 3\nmin_ngram: 1\nmid_ngram: 2\n")
    with (
        own_choices(tmp_path),
        pytest.raises(ValueError, match=r"drafter\.mid_ngram is not a field of NgramConfig; did"),
    ):
        typed(compose("train", ["drafter=mine"]), TrainConfig)


def test_composed_default_is_the_golden_one() -> None:
    """A changed default is a visible diff: python scripts/update_golden.py."""
    assert OmegaConf.to_yaml(compose("train", [])) == GOLDEN.read_text()


def test_tiny_trains_on_its_own_words_and_real_models_on_real_data() -> None:
    for name in choices("model"):
        config = compose("train", [f"model={name}"])
        assert (config.data.name == "selfgen") == (config.model.repo is None), name
        assert config.model.repo is None or config.data.repo, name


def test_data_on_the_command_line_wins_over_the_models_own() -> None:
    for overrides in (["model=llama8b", "data=selfgen"], ["data=selfgen", "model=llama8b"]):
        assert compose("train", overrides).data.name == "selfgen"
    assert compose("train", ["model=llama70b", "data.limit=7"]).data.limit == 7


def test_a_run_is_read_back_as_it_was_told(run_folder: Path) -> None:
    told = typed(compose("train", [f"run.dir={run_folder}"]), TrainConfig)
    for command in ("evaluate", "export"):
        config = typed(compose(command, [f"run.dir={run_folder}"]), COMMANDS[command])
        for section in ("run", "model", "data", "drafter", "hardware"):
            assert getattr(config, section) == getattr(told, section)


def test_the_command_line_wins_over_what_a_run_was_told(run_folder: Path) -> None:
    config = compose(
        "evaluate",
        [f"run.dir={run_folder}", "hardware=cpu", "model.path=/models/x", "drafter=medusa"],
    )
    assert config.hardware.name == "cpu"
    assert config.model.path == "/models/x"
    assert config.model.name == "tiny"
    assert config.drafter.name == "medusa"
    assert config.run.dir == str(run_folder)


def test_a_drafter_trained_elsewhere_needs_no_run(tmp_path: Path) -> None:
    folder = tmp_path / "their-eagle3"
    config = typed(compose("evaluate", [f"drafter.path={folder}"]), EvaluateConfig)
    assert type(config.drafter).__name__ == "AdmittedConfig"
    assert config.drafter.path == str(folder)  # type: ignore[attr-defined]
    assert config.drafter.name == "their-eagle3", "reports name it by its directory"
    assert config.run.dir == "outputs/their-eagle3-tiny-evaluation"
    assert (config.model.name, config.eval.name) == ("tiny", "default")
    named = compose("evaluate", [f"drafter.path={folder}", "drafter.name=x", "model=llama8b"])
    assert named.run.dir == "outputs/x-llama8b-evaluation"
    assert named.model.name == "llama8b"
    given = compose("evaluate", [f"drafter.path={folder}", f"run.dir={tmp_path / 'new'}"])
    assert given.run.dir == str(tmp_path / "new")
    assert given.model.name == "tiny"


def test_a_drafter_that_needs_no_training_needs_no_run() -> None:
    config = typed(compose("evaluate", ["drafter=ngram", "drafter.max_ngram=4"]), EvaluateConfig)
    assert config.drafter.max_ngram == 4  # type: ignore[attr-defined]
    assert config.run.dir == "outputs/ngram-tiny-evaluation"


def test_a_runs_own_evaluation_is_not_replaced_by_another_drafters(run_folder: Path) -> None:
    run = f"run.dir={run_folder}"
    other = compose("evaluate", [run, "drafter.path=/drafters/theirs", "model.name=mine"])
    assert other.drafter._target_ == "drafttrain.formats.read.admit.AdmittedConfig"
    assert other.model.name == "mine", "the run's model"
    assert other.run.dir == str(run_folder)
    assert other.eval.name == "theirs"
    assert compose("evaluate", [run, "drafter=ngram"]).eval.name == "ngram"
    assert compose("evaluate", [run, "drafter=ngram", "eval.name=x"]).eval.name == "x"
    assert compose("evaluate", [run]).eval.name == "default"


def test_an_evaluation_without_a_run_is_repeated_by_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where there is no outputs/selfgen
    told = typed(
        compose("evaluate", ["drafter.path=/d/theirs", f"run.dir={tmp_path}", "run.seed=7"]),
        EvaluateConfig,
    )
    record_evaluation(told)
    again = typed(compose("evaluate", [f"run.dir={tmp_path}"]), EvaluateConfig)
    for section in ("run", "model", "data", "drafter", "hardware", "tracker"):
        assert getattr(again, section) == getattr(told, section)


def test_the_config_of_a_run_is_not_written_over(run_folder: Path) -> None:
    before = (run_folder / "config.yaml").read_text()
    other = ["drafter.path=/d/theirs", f"run.dir={run_folder}"]
    record_evaluation(typed(compose("evaluate", other), EvaluateConfig))
    assert (run_folder / "config.yaml").read_text() == before


def test_a_run_folder_that_moved_is_found_where_it_is(run_folder: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    (run_folder / "config.yaml").rename(moved / "config.yaml")
    assert compose("evaluate", [f"run.dir={moved}"]).run.dir == str(moved)


def test_each_command_asks_for_sections_it_knows() -> None:
    for command, schema in COMMANDS.items():
        own = PLACES.get(command, "run")
        sections, groups = {field.name for field in fields(schema)}, set(command_groups(command))
        assert sections - groups <= {own}
        # Which entries of conf/model or conf/experiment may choose for every command.
        assert groups - sections <= {"trainer", "optimizer", "features", "deepspeed"}
        assert set(content_of("", command)) == {own}
    told = documented(conf_dir() / "train.yaml")
    assert set(told) == {f"run.{field.name}" for field in fields(RunConfig)}


def test_most_used_keys_and_examples_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs" / "demo").mkdir(parents=True)
    saved = typed(compose("train", ["run.name=demo"]), TrainConfig)
    write_config(saved, tmp_path / "outputs" / "demo" / "config.yaml")
    for command, keys in MOST_USED.items():
        base = ["run.dir=outputs/demo"] if "run" in command_groups(command) else []
        base += ["store.dir=outputs/store"] if command == "capture" else []
        config = compose(command, base)
        for key in keys:
            assert OmegaConf.select(config, key, default="absent") != "absent", key
        for example in EXAMPLES[command]:
            name, *overrides = shlex.split(example)
            assert name == command
            compose(command, overrides)


def test_a_checkpointed_run_is_not_overwritten(run_folder: Path) -> None:
    (run_folder / "checkpoints" / "step_10").mkdir(parents=True)
    config = typed(compose("train", [f"run.dir={run_folder}"]), TrainConfig)
    with pytest.raises(ValueError, match=r"earlier run; resume it by run\.resume=true, or"):
        check_run_folder(config)


def test_a_run_without_checkpoints_may_start_again(run_folder: Path) -> None:
    (run_folder / "checkpoints").mkdir()
    check_run_folder(typed(compose("train", [f"run.dir={run_folder}"]), TrainConfig))


OWN_DRAFTER = """
from dataclasses import dataclass
from drafttrain.drafters.base import DrafterConfig

@dataclass(frozen=True, kw_only=True)
class MineConfig(DrafterConfig):
    width: int
"""


def test_a_drafter_of_ones_own_needs_no_fork(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_drafter.py").write_text(OWN_DRAFTER)
    (tmp_path / "my_conf" / "drafter").mkdir(parents=True)
    own = tmp_path / "my_conf"
    yaml_text = "# Mine.\n_target_: my_drafter.MineConfig\n\n# Its width.\nwidth: 3\n\nname: mine\n"
    (own / "drafter" / "mine.yaml").write_text(yaml_text)
    monkeypatch.syspath_prepend(str(tmp_path))
    with own_choices(own):
        config = typed(compose("train", ["drafter=mine", "drafter.width=4"]), TrainConfig)
        assert type(config.drafter).__name__ == "MineConfig"
        assert config.drafter.width == 4  # type: ignore[attr-defined]
        # What a run folder says is trusted only with the user's own yaml beside it.
        write_config(config, run_folder / "config.yaml")
        again = typed(compose("evaluate", [f"run.dir={run_folder}"]), EvaluateConfig)
        assert again.drafter == config.drafter
        assert recorded(run_folder, TrainConfig, "run.init_from").drafter == config.drafter
        assert load_choice("drafter", "mine").width == 3
    with pytest.raises(ValueError, match=r"_target_ must name a class of drafttrain or of a yaml"):
        typed(compose("evaluate", [f"run.dir={run_folder}"]), EvaluateConfig)
    sys.modules.pop("my_drafter")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("os.system", "must name a class of drafttrain or of a yaml of yours, got os.system"),
        (
            "drafttrain.runtime.run_folder.RunConfig",
            "must name a subclass of DrafterConfig, got RunConfig",
        ),
        ("drafttrain.drafters.base.torch", "must name a class, got"),
        ("drafttrain.drafters.nothing.X", "must name a class that can be imported, got"),
    ],
)
def test_target_names_a_subclass_of_its_section_and_nothing_else(target: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        typed(compose("train", [f"drafter._target_={target}"]), TrainConfig)


def test_a_run_whose_config_is_broken_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"run\.dir must be the folder of a run, .* no config"):
        load_config(tmp_path)
    (tmp_path / "config.yaml").write_text("a: [1")
    with pytest.raises(ValueError, match=r"config\.yaml must be yaml, got"):
        load_config(tmp_path)
    (tmp_path / "config.yaml").write_text("[1]")
    with pytest.raises(ValueError, match="must hold the sections of a run"):
        load_config(tmp_path)
    (tmp_path / "config.yaml").write_text("run: {}")
    with pytest.raises(ValueError, match=r"must have run\.allow_changes, but another version wrot"):
        compose("evaluate", [f"run.dir={tmp_path}"])


def test_a_target_is_called_after_its_folder(tmp_path: Path) -> None:
    config = compose("train", [f"model.path={tmp_path}/Qwen2 0.6B"])
    assert (config.model.name, config.run.name) == ("Qwen2-0.6B", "eagle3-Qwen2-0.6B")
    cached = f"{tmp_path}/hub/models--Qwen--Qwen2-0.5B/snapshots/0123abc"
    assert compose("plan", [f"model.path={cached}"]).model.name == "Qwen2-0.5B"
    assert compose("train", [f"model.path={tmp_path}", "model.name=mine"]).model.name == "mine"
    assert compose("train", ["model.path=null"]).model.name == "tiny"


def test_an_evaluation_needs_no_text_to_train_on_and_so_no_chat_template() -> None:
    """A target without a template is measured with data.template=none alone."""
    told = ["drafter=ngram", "data.template=none"]
    config = typed(compose("evaluate", told), EvaluateConfig)
    assert config.data.text_format.kind == "none"
    with pytest.raises(ValueError, match=r"data.template must be chat for data=selfgen"):
        config.data.check_text()


def test_a_home_is_found_in_every_folder(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(run_folder.parent))
    run = f"run.dir=~/{run_folder.name}"
    assert compose("train", [run]).run.dir == str(run_folder)
    config = compose("export", [run, "export.dir=~/out"])
    assert (config.run.dir, config.export.dir) == (str(run_folder), f"{run_folder.parent}/out")
    assert compose("capture", ["store.dir=~/store"]).store.dir == f"{run_folder.parent}/store"
    assert compose("plan", ["plan.measured=~/run"]).plan.measured == f"{run_folder.parent}/run"
    made = compose("export", [run, "export=gguf", "export.converter=~/llama.cpp"]).export
    assert made.converter == f"{run_folder.parent}/llama.cpp"
    stored = compose("train", ["features=stored", "features.dir=~/store"])
    assert stored.features.dir == f"{run_folder.parent}/store"
    compared = compose("compare", ["runs=['~/a',b]", "compare.dir=~/c"]).compare
    assert compared.runs == [f"{run_folder.parent}/a", "b"]
    assert compared.dir == f"{run_folder.parent}/c"
    (run_folder / "checkpoints" / "step-000001").mkdir(parents=True)
    again = compose("train", [run, "run.resume=true", "run.name=other"])
    assert again.run.dir == str(run_folder)


def test_a_rate_or_a_length_that_changes_nothing_is_refused_and_a_repeated_one_is_not(
    tmp_path: Path,
) -> None:
    """The refusals themselves: tests/commands/test_cli.py."""
    for given in (["drafter.lr=0.01"], ["trainer=full", "drafter.lr=0.01", "trainer.lr=0.02"]):
        assert compose("train", given).drafter.lr == 0.01
    told = [f"run.dir={tmp_path}", "drafter.lr=0.01", "trainer.epochs=2"]
    config = typed(compose("train", [*told, "trainer=auto"]), TrainConfig)
    sized = config.trainer.sized(100_000, lambda *_: 300, 64, config.drafter.lr)  # type: ignore[attr-defined]
    write_config(replace(config, trainer=sized), tmp_path / "config.yaml")
    (tmp_path / "checkpoints" / "step-000001").mkdir(parents=True)
    assert compose("train", [*told, "run.resume=true"]).trainer.max_steps == sized.max_steps
    with pytest.raises(UsageError, match=r"drafter\.lr=0\.02 has no effect with trainer\.lr="):
        compose("train", [told[0], "run.resume=true", "drafter.lr=0.02"])


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ([], []),
        (["model=llama8b"], ["model=llama8b"]),
        (["model=llama8b", "model.path=/models/mine"], ["model.path=/models/mine"]),
        (
            ["model=random", "model.num_layers=3", "model.attention=eager"],
            ["model=random", "model.attention=eager", "model.num_layers=3"],
        ),
        (["model.inflate=200M"], ["model.inflate=200M"]),
    ],
)
def test_a_target_is_named_again_by_what_it_was_told(given: list[str], told: list[str]) -> None:
    model = typed(compose("train", given), TrainConfig).model
    assert told_target(model) == told
    again = typed(compose("train", told), TrainConfig).model
    assert (again.name, again.path, again.inflate) == (model.name, model.path, model.inflate)


def test_the_comments_of_dtypes_name_their_values_and_what_auto_is() -> None:
    told = documented(conf_dir() / "hardware" / "auto.yaml")
    for key in ("dtype", "draft_dtype", "train_dtype", "weights_dtype"):
        comment, value = told[key]
        assert {"float32", "bfloat16"} <= set(re.findall(r"\w+", comment)), key
        assert value != "auto" or "auto (" in comment, key
    assert "bfloat16 on a GPU" in told["dtype"][0]


def test_the_comment_of_a_sweep_says_what_it_does_to_the_report() -> None:
    comment, _ = documented(conf_dir() / "eval" / "default.yaml")["depths"]
    assert "about the fastest" in comment
    assert "a third fewer" in comment
