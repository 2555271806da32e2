"""A sweep: which jobs a command line stands for, what they are called and where they write."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from drafttrain.config.compose import compose, typed
from drafttrain.config.groups import own_choices, read_choice
from drafttrain.config.overrides import parse
from drafttrain.config.sections import TrainConfig
from drafttrain.config.sweep import _values, listed, several, sweep_of
from drafttrain.runtime.run_folder import write_config


def test_every_combination_is_a_job_with_a_name_and_a_run_of_its_own() -> None:
    told = ["drafter=eagle3,medusa", "trainer.lr=1.0e-3", "run.seed=range(2)"]
    sweep = sweep_of("train", told)
    names = ["eagle3-seed_0", "eagle3-seed_1", "medusa-seed_0", "medusa-seed_1"]
    assert [job.name for job in sweep.jobs] == names
    assert sweep.jobs[1].told == ["drafter=eagle3", "run.seed=1"]
    assert [job.run for job in sweep.jobs] == [str(sweep.folder / name) for name in names]
    assert sweep.folder.parent == Path("outputs/sweeps")
    config = compose("train", sweep.jobs[3].overrides)
    assert (config.drafter.name, config.run.seed, config.run.name) == ("medusa", 1, names[3])
    assert config.trainer.lr == 1e-3


def test_the_same_command_line_finds_its_folder_and_another_does_not() -> None:
    first = sweep_of("train", ["run.seed=0,1"]).folder
    assert sweep_of("train", ["run.seed=0,1"]).folder == first
    assert sweep_of("train", ["run.seed=0,2"]).folder != first
    named = sweep_of("train", ["run.seed=0,2", "hydra.sweep.dir=outputs/mine"])
    assert named.folder == Path("outputs/mine")
    assert [job.run for job in named.jobs] == ["outputs/mine/seed_0", "outputs/mine/seed_2"]


def test_hydras_ways_to_give_several_values_are_understood() -> None:
    for text in (
        "drafter=choice(eagle,eagle3)",
        "drafter=glob(eagle*,exclude=eagle3_1)",
        "drafter=eagle,eagle3",
    ):
        assert [job.name for job in sweep_of("train", [text]).jobs] == ["eagle", "eagle3"]
    lists = sweep_of("train", ["drafter.layers=[1,2],[0]", "drafter.losses={forward_kl:1}"])
    layers = [compose("train", job.overrides).drafter.layers for job in lists.jobs]
    assert layers == [[1, 2], [0]]
    assert len({job.run for job in lists.jobs}) == 2
    assert [job.name for job in sweep_of("train", ["run.seed=3"]).jobs] == ["train"]


def test_the_runs_of_a_sweep_are_a_group_at_the_tracker(tmp_path: Path) -> None:
    told = ["tracker=wandb", "tracker.tags=[mine]", "drafter=eagle3,medusa", "data.path='a b',c"]
    sweep = sweep_of("train", [*told, "data=jsonl"])
    seen = [compose("train", job.overrides).tracker for job in sweep.jobs]
    assert {tracker.group for tracker in seen} == {sweep.folder.name}
    assert list(seen[2].tags) == ["mine", "drafter=medusa", "data.path='a b'"]
    long = sweep_of("train", [f"run.name={'a' * 70},b", "tracker=wandb", "tracker.group=ours"])
    tracker = compose("train", long.jobs[0].overrides).tracker
    assert (tracker.group, list(tracker.tags)) == ("ours", [f"run.name={'a' * 55}"])
    assert not any("tracker" in text for text in sweep_of("train", told[2:3]).jobs[0].overrides)
    # What measures a run goes on in that run's own place at the tracker.
    config = typed(compose("train", [f"run.dir={tmp_path}", "tracker=wandb"]), TrainConfig)
    write_config(config, tmp_path / "config.yaml")
    (job, _) = sweep_of("evaluate", [f"run.dir={tmp_path}", "eval.depth=1,2"]).jobs
    assert not any("tracker" in text for text in job.overrides)


def test_names_that_meet_are_told_apart() -> None:
    jobs = sweep_of("train", ["data=jsonl", "data.path='a b','a/b'"]).jobs
    assert [job.name for job in jobs] == ["path_a_b", "path_a_b-no2"]
    assert len({job.run for job in jobs}) == 2


@pytest.mark.parametrize(
    ("command", "told", "key"),
    [
        ("evaluate", ["drafter=ngram,two_model"], "run.dir"),
        ("capture", ["drafter=eagle,medusa"], "store.dir"),
        ("plan", ["drafter=eagle,medusa"], "plan.dir"),
        ("compare", ["runs=[a,b]", "compare.seed=0,1"], "compare.dir"),
        ("regenerate", ["data.path=talk.jsonl", "regenerate.seed=0,1"], "regenerate.out"),
    ],
)
def test_no_job_writes_where_another_does(command: str, told: list[str], key: str) -> None:
    sweep = sweep_of(command, told)
    section, _, name = key.partition(".")
    places = {compose(command, job.overrides)[section][name] for job in sweep.jobs}
    assert len(places) == len(sweep.jobs) == 2
    assert all(Path(place).parent == sweep.folder for place in places)
    given = sweep_of(command, [*told, f"{key}=mine"])
    assert {compose(command, job.overrides)[section][name] for job in given.jobs} == {"mine"}


def test_evaluations_of_one_run_get_names_and_those_of_several_do_not(tmp_path: Path) -> None:
    runs = [str(tmp_path / name) for name in ("a", "b")]
    for run in runs:
        Path(run).mkdir()
        config = typed(compose("train", [f"run.dir={run}"]), TrainConfig)
        write_config(config, Path(run) / "config.yaml")
    over_runs = sweep_of("evaluate", [several("run.dir", runs)])
    assert [(job.name, job.run, job.evaluation) for job in over_runs.jobs] == [
        ("a", runs[0], "default"),
        ("b", runs[1], "default"),
    ]
    over_depths = sweep_of("evaluate", [f"run.dir={runs[0]}", "eval.depth=2,4"])
    assert [job.evaluation for job in over_depths.jobs] == ["depth_2", "depth_4"]
    assert {job.run for job in over_depths.jobs} == {runs[0]}


def test_lists_of_paths_are_written_as_they_are_read(tmp_path: Path) -> None:
    odd = [f"{tmp_path}/a b", f"{tmp_path}/it's,here", "plain-1.0/x"]
    assert compose("compare", [listed("runs", odd)]).compare.runs == odd
    jobs = sweep_of("train", ["data=jsonl", several("data.path", odd)]).jobs
    assert [compose("train", job.overrides).data.path for job in jobs] == odd


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ("drafter=eagle,medsua", r"drafter=medsua is not a choice; did you mean medusa\?"),
        ("trainer.lrr=1,2", "trainer=default has no key lrr"),
        ("trainer.lr=interval(0,1)", r"must give values one by one, as a,b or range\(3\)"),
        ("trainer.lr=range(0)", "must give values, got none"),
        ("hydra.run.dir=x", "no section is called hydra"),
    ],
)
def test_a_mistake_is_answered_before_any_job(told: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        sweep_of("train", [told])


def test_an_experiment_gives_the_values_to_sweep_over(tmp_path: Path) -> None:
    folder = tmp_path / "experiment"
    folder.mkdir()
    head = "# @package _global_\n# Mine.\ntrainer:\n  max_steps: 7\n"
    params = "hydra:\n  sweeper:\n    params:\n      drafter: eagle,medusa\n      run.seed: 0,1\n"
    (folder / "mine.yaml").write_text(head + params)
    (folder / "flat.yaml").write_text("# @package _global_\n# Mine.\nhydra:\n  sweeper: 3\n")
    with own_choices(tmp_path):
        names = [job.name for job in sweep_of("train", ["+experiment=mine"]).jobs]
        assert names == ["eagle-seed_0", "eagle-seed_1", "medusa-seed_0", "medusa-seed_1"]
        sweep = sweep_of("train", ["+experiment=mine", "run.seed=5"])
        assert [job.name for job in sweep.jobs] == ["eagle", "medusa"]  # the command line wins
        config = compose("train", sweep.jobs[1].overrides)
        assert (config.drafter.name, config.run.seed, config.trainer.max_steps) == ("medusa", 5, 7)
        (folder / "more.yaml").write_text("# @package _global_\n# Mine.\ndefaults:\n  - mine\n")
        assert [job.name for job in sweep_of("train", ["+experiment=more"]).jobs] == names
        with pytest.raises(ValueError, match=r"sweeper\.params of experiment=flat must be keys"):
            sweep_of("train", ["+experiment=flat"])


BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "conf"
SWEEPING = [
    file for file in sorted(BENCHMARKS.glob("experiment/*.yaml")) if "hydra" in read_choice(file)
]


@pytest.fixture
def of_benchmarks() -> Iterator[None]:
    with own_choices(BENCHMARKS):
        yield


@pytest.mark.usefixtures("of_benchmarks")
@pytest.mark.parametrize("file", SWEEPING, ids=lambda file: file.stem)
def test_every_experiment_of_the_benchmarks_composes_all_its_jobs(file: Path) -> None:
    """Each value of each key is in one of the jobs that are composed, if not with every other."""
    name, params = file.stem, read_choice(file)["hydra"]["sweeper"]["params"]
    parsed = parse("train", [f"{key}={text}" for key, text in params.items()], sweeps=True)
    values = [_values(override) for override in parsed]
    most = max(map(len, values))
    assert most > 1
    for row in range(most):
        told = [each[row % len(each)] for each in values]
        assert len(sweep_of("train", [f"+experiment={name}", *told]).jobs) == 1
