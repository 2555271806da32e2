"""The commands that measure, in process, on a random target of four layers: what they leave."""

import json
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from builders import draft_model_dir

from drafttrain.__main__ import main
from drafttrain.commands.setup.evaluation import set_up
from drafttrain.config.compose import compose, typed
from drafttrain.config.sections import EvaluateConfig, TuneConfig
from drafttrain.evaluation import evaluate, tune
from drafttrain.evaluation.measurements import Measurements
from drafttrain.evaluation.optimal_tree import RankCounts, count_ranks
from drafttrain.evaluation.record import keep, require_same
from drafttrain.runtime.run_folder import load_config

pytestmark = pytest.mark.usefixtures("plain_pictures")

PROMPTS = [
    {"id": "sum", "task": "math", "turns": ["What is 2 + 2?"]},
    {"id": "half", "task": "math", "turns": ["Halve 10."]},
    {"id": "talk", "task": "chat", "turns": ["Say hello.", "And good bye."]},
]


@pytest.fixture(scope="module")
def run(tiny_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps of Medusa."""
    folder = tmp_path_factory.mktemp("measured")
    data = folder / "data.jsonl"
    with data.open("w") as file:
        for number in range(24):
            messages = [
                {"role": "user", "content": f"What is {number} plus {number}?"},
                {"role": "assistant", "content": f"It is {2 * number}."},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    place = folder / "run"
    arguments = ["train", f"run.dir={place}", "drafter=medusa", f"model.path={tiny_target_dir}"]
    arguments += ["data=jsonl", f"data.path={data}", "data.holdout=2", "trainer.max_steps=2"]
    arguments += ["trainer.tokens_per_step=64", "trainer.validation_prompts=1", *QUICK]
    assert main([*arguments, "trainer.validation_tokens=4"]) == 0
    return place


QUICK = ["hardware=cpu", "hardware.threads=1", "hardware.dtype=float32"]
SHORT = ["eval.max_new_tokens=6", "eval.resamples=100", "eval.lossless_prompts=2", "eval.depth=3"]


def model_of(run: Path) -> list[str]:
    """The run's target, for evaluations outside of the run."""
    return [f"model.path={yaml.safe_load((run / 'config.yaml').read_text())['model']['path']}"]


def prompts_of(run: Path) -> str:
    return f"eval.prompts={run.parent / 'prompts.jsonl'}"


def test_an_evaluation_is_certified_swept_and_written(run: Path, tmp_path: Path) -> None:
    draft = draft_model_dir(97)
    arguments = ["evaluate", f"run.dir={run}", prompts_of(run), *SHORT, "eval.name=swept"]
    arguments += ["eval.certify=true", "eval.depths=[1]", "eval.batch_sizes=[2]"]
    arguments += ["eval.temperatures=[1.0]", f"eval.two_model={draft}", "eval.price_per_hour=2"]
    assert main(arguments) == 0
    place = run / "evaluations" / "swept"
    report = json.loads((place / "report.json").read_text())
    assert report["certificate"]["certified"], report["certificate"]
    assert set(report["methods"]) == {"autoregressive", "ngram", "two_model"}
    points = {(p["temperature"], p["batch_size"], p["depth"]) for p in report["sweep"]}
    # Without eval.batch_size's own value in the lists, the base point is measured besides.
    assert points == {(0.0, 1, 1), (0.0, 1, 3), (1.0, 2, 1), (1.0, 2, 3)}
    assert report["verdicts"]["all"]["depth"] in (1, 3)
    titles = [table["title"] for table in report["tables"]]
    assert titles == ["Certificate", "Depth, temperature and batch"]
    text = (place / "report.md").read_text()
    assert "## Certificate" in text
    assert "Speedup by depth" in (place / "report.html").read_text()
    journals = sorted(path.name for path in place.glob("*.jsonl"))
    assert journals == [
        "temperature0-batch1.measurements.jsonl",
        "temperature1-batch2.measurements.jsonl",
    ]


@pytest.mark.parametrize("key", ["eval.two_model", "drafter=two_model drafter.path"])
def test_a_draft_model_with_a_shorter_context_is_refused_before_decoding(
    key: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = tmp_path / "short"
    shutil.copytree(draft_model_dir(97), short)
    config = json.loads((short / "config.json").read_text())
    config["max_position_embeddings"] = 20
    (short / "config.json").write_text(json.dumps(config))
    *before, key = key.split()
    place = tmp_path / "place"
    given = [f"run.dir={run}"] if not before else [f"run.dir={place}", *model_of(run), *QUICK]
    arguments = ["evaluate", *given, prompts_of(run), *SHORT, "eval.name=short"]
    assert main([*arguments, *before, f"{key}={short}"]) == 2
    told = capsys.readouterr().err
    assert "drafter=two_model has 20 positions" in told
    assert not place.exists()
    assert not (run / "evaluations" / "short").exists()


def test_a_run_of_another_family_is_named_before_its_weights_are_compared(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = [f"run.dir={run}", prompts_of(run), *SHORT, "eval.name=other", "drafter=hydra_heads"]
    assert main(["evaluate", *told]) == 2
    said = capsys.readouterr().err
    family = load_config(run)["drafter"]["name"]
    assert f"holds a drafter of the family {family}, got drafter=hydra_heads; give" in said
    assert main(["evaluate", *told[:-1], "drafter.name=mine"]) == 0, "a name is no family"


def test_measurements_of_another_drafter_are_not_taken_up(run: Path, tmp_path: Path) -> None:
    def marks(name: str, *arguments: str) -> set[str]:
        place = tmp_path / name
        told = ["evaluate", f"run.dir={place}", *model_of(run), *QUICK, prompts_of(run), *SHORT]
        told += ["eval.name=same", "eval.lossless_prompts=0"]
        assert main([*told, *arguments]) == 0
        report = json.loads((place / "evaluations/same/report.json").read_text())
        assert report["provenance"]["checkpoint"] is None  # nobody's run
        files = (place / "evaluations/same").glob("*.jsonl")
        return {json.loads(file.read_text().splitlines()[0])["mark"] for file in files}

    one = marks("one", "drafter=ngram", "eval.temperatures=[0,1]")
    other = marks("other", "drafter=ngram", "eval.temperatures=[0,1]", "drafter.max_ngram=5")
    assert len(one | other) == 4  # nor of another point of the sweep


def test_an_evaluation_is_not_replaced_by_one_of_other_settings_unless_asked(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    shutil.copy(run.parent / "prompts.jsonl", prompts)
    told = ["evaluate", f"run.dir={tmp_path / 'run'}", *model_of(run), *QUICK, *SHORT]
    told += ["drafter=ngram", "eval.lossless_prompts=0", f"eval.prompts={prompts}"]
    told += ["eval.name=one", "eval.blocks=1"]
    place = tmp_path / "run/evaluations/one"
    raw, report = place / "temperature0-batch1.measurements.jsonl", place / "report.json"
    assert main(told) == 0
    assert main(told) == 0  # the same again
    before = raw.read_bytes(), report.read_bytes()

    def refused(*arguments: str) -> str:
        capsys.readouterr()
        assert main([*told, *arguments]) in (1, 2)
        assert (raw.read_bytes(), report.read_bytes()) == before
        return capsys.readouterr().err

    assert refused("eval.prompts_per_task=1") == (
        f"error: eval.prompts_per_task must be null as in {report}, which exists and is not "
        "replaced by other measurements, got 1; keep both by eval.name=OTHER_NAME, or replace it "
        "by eval.overwrite=true\n"
    )
    assert "drafter.max_ngram must be " in refused("drafter.max_ngram=5")
    thinking = refused("data.template_kwargs={enable_thinking: true}")
    assert "data.template_kwargs must be {} as in " in thinking
    text = prompts.read_text()
    prompts.write_text("".join(text.splitlines(keepends=True)[:1]))
    assert "the prompts must be " in refused()
    assert main([*told, "eval.name=other"]) == 0
    assert (raw.read_bytes(), report.read_bytes()) == before
    (place / "settings.json").unlink()
    assert "the settings it was measured with are not recorded" in refused()
    assert main([*told, "eval.overwrite=true"]) == 0
    assert raw.read_bytes() != before[0]


def test_a_choice_is_not_replaced_by_one_of_other_settings(tmp_path: Path) -> None:
    tuned, settings = tmp_path / "tuned.json", {"tune.rounds": 2, "tune.depths": [1, 2]}
    ways = "replace it by tune.overwrite=true"
    require_same(tmp_path / "tune", tuned, settings, False, ways)
    tuned.write_text("{}")
    (tmp_path / "tune").mkdir()
    keep(tmp_path / "tune", settings)
    require_same(tmp_path / "tune", tuned, settings, False, ways)
    require_same(tmp_path / "tune", tuned, {"tune.rounds": 3}, True, ways)
    with pytest.raises(ValueError, match=r"^tune\.rounds must be 2 as in .*, got 3; replace it by"):
        require_same(tmp_path / "tune", tuned, {"tune.rounds": 3}, False, ways)


def test_a_lossy_rule_in_a_sweep_says_so_though_the_report_is_greedy(run: Path) -> None:
    arguments = ["evaluate", f"run.dir={run}", prompts_of(run), *SHORT, "eval.name=lossy_sweep"]
    arguments += [
        "eval.policy=chain",
        "eval.rule=typical",
    ]  # an untrained drafter drafts all the same
    assert main([*arguments, "eval.temperatures=[0,1]"]) == 0
    report = json.loads((run / "evaluations/lossy_sweep/report.json").read_text())
    checks = {check["name"]: check for check in report["certificate"]["checks"]}
    assert checks["one-step distribution"]["measured"] > 0
    [sweep] = [table for table in report["tables"] if table["title"].startswith("Depth")]
    assert any("temperature 1" in note and "NOT lossless" in note for note in sweep["notes"])


def test_a_tune_that_stops_goes_on_from_every_batch_size(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["tune", f"run.dir={run}", prompts_of(run), *SHORT, "tune.depths=[1]"]
    arguments += ["tune.batch_sizes=[1,2]", "tune.contexts=[8]", "tune.rounds=1", "eval.depth=auto"]
    real = tune.measure

    def stops(*given: Any, **settings: Any) -> Any:
        if settings["batch_size"] == 2:
            raise KeyboardInterrupt
        return real(*given, **settings)

    monkeypatch.setattr(tune, "measure", stops)
    assert main(arguments) == 130
    assert list((run / "tune").glob("batch1.*.measurements.partial.jsonl"))
    monkeypatch.setattr(tune, "measure", real)
    known = []

    def noted(*given: Any) -> Measurements:
        known.append(Measurements(*given))
        return known[-1]

    monkeypatch.setattr(tune, "Measurements", noted)
    assert main(arguments) == 0
    assert len(known[0].known) == len(PROMPTS)
    (run / "tuned.json").unlink()  # the next test begins without


def test_a_witness_gets_the_results_at_its_own_depth(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It drafts at eval.depth, whichever depth of a sweep is the fastest."""
    monkeypatch.setattr(evaluate, "choosing_prompts", lambda *_: {"half"})
    monkeypatch.setattr(evaluate, "fastest", lambda *_: 1)
    given = [f"run.dir={run}", prompts_of(run), *SHORT, "eval.depths=[1]", "eval.blocks=1"]
    setup = set_up(typed(compose("evaluate", [*given, "eval.lossless_prompts=0"]), EvaluateConfig))
    report, results, _ = evaluate.evaluate_drafter(setup, tmp_path, {})
    assert report.depth == 1
    drafted = [result for result in results if result.method == "medusa"]
    assert max(depth for result in drafted for _, depth, *_ in result.stats.passes) == 3


@pytest.mark.parametrize("command", ["evaluate", "tune"])
def test_a_stopped_measurement_of_other_prompts_under_the_same_name_is_not_taken_up(
    command: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, place = tmp_path / "prompts.jsonl", tmp_path / "run"
    shutil.copytree(run, place)
    told = [command, f"run.dir={place}", *SHORT, "drafter=ngram", f"eval.prompts={prompts}"]
    told += ["eval.lossless_prompts=0", "eval.name=stopped"]
    if command == "tune":
        told += ["tune.depths=[1]", "tune.batch_sizes=[1]", "tune.contexts=[8]", "tune.rounds=1"]
    known = []

    class Stopping(Measurements):
        def add(self, *given: Any) -> None:
            super().add(*given)
            known.append(len(self.known))
            raise KeyboardInterrupt

    monkeypatch.setattr(evaluate if command == "evaluate" else tune, "Measurements", Stopping)
    for asked in (PROMPTS, PROMPTS, PROMPTS[::-1]):
        prompts.write_text("".join(json.dumps(prompt) + "\n" for prompt in asked))
        assert main(told) == 130
    assert known == [0, 1, 0]


def test_tune_refuses_a_prompt_that_its_deepest_chain_has_no_room_for(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "measure_costs", lambda *_, **__: pytest.fail("measured"))
    arguments = ["tune", f"run.dir={run}", prompts_of(run), *SHORT, "drafter=ngram"]
    arguments += ["tune.depths=[1,40]", "tune.contexts=[8]"]
    assert main([*arguments, "eval.max_new_tokens=220"]) == 2
    told = capsys.readouterr().err
    assert "eval.prompts: talk may need" in told
    assert "eval.max_new_tokens=220 and drafts of 40 leave" in told
    given = [*arguments[1:], "eval.max_new_tokens=220", "eval.skip_long_prompts=true"]
    kept = set_up(typed(compose("tune", given), TuneConfig)).prompts
    assert [prompt.id for prompt in kept] == ["sum", "half"]
    assert main([*arguments, "tune.depths=[1]", "eval.policy=optimal_tree"]) == 2
    assert "eval.policy must not be optimal_tree for drafter=ngram" in capsys.readouterr().err


def test_what_tune_cannot_draft_is_refused_by_its_own_keys(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["tune", f"run.dir={run}", prompts_of(run), *SHORT, "drafter=two_model"]
    short = tmp_path / "short"
    shutil.copytree(draft_model_dir(97), short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 256}))

    def refused(*told: str) -> str:
        assert main([*arguments, f"drafter.path={short}", *told]) == 2
        return capsys.readouterr().err

    told = refused("tune.depths=[1,300]")
    assert "tune.depths must be at most 249, got 300: drafter=two_model has 256 positions" in told
    told = refused("tune.depths=[1]")
    assert "room in the 256 positions of drafter=two_model, got 256, which needs 274" in told
    told = refused("eval.policy=static_tree")
    assert "eval.tree must have 8 levels, as deep as the deepest of eval.depth and tune" in told


def test_a_lossy_rule_says_so_wherever_it_appears(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["evaluate", f"run.dir={run}", prompts_of(run), *SHORT, "eval.name=lossy"]
    assert main([*arguments, "eval.rule=lenience", "eval.temperature=1.0"]) == 0
    report = json.loads((run / "evaluations/lossy/report.json").read_text())
    assert not report["lossless"]["lossless"]
    checks = {check["name"]: check for check in report["certificate"]["checks"]}
    assert checks["one-step distribution"]["measured"] > 0
    assert {"distribution of the sampled text", "quality"} <= set(checks)
    told = " ".join(capsys.readouterr().out.split())
    assert "NOT lossless" in told
    for name in ("report.md", "report.html"):
        assert "NOT lossless" in (run / "evaluations/lossy" / name).read_text()


def test_tune_chooses_a_depth_that_evaluate_and_export_take(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = ["evaluate", f"run.dir={run}", prompts_of(run), *SHORT, "eval.depth=auto"]
    assert main(missing) == 2
    assert "eval.depth=auto takes what `tune` chose from" in capsys.readouterr().err
    arguments = ["tune", f"run.dir={run}", prompts_of(run), *SHORT, "tune.depths=[1,2,9]"]
    arguments += ["tune.batch_sizes=[1,2]", "tune.contexts=[8]", "tune.rounds=1"]
    assert main(arguments) == 0
    tuned = json.loads((run / "tuned.json").read_text())
    assert set(tuned["batches"]) == {"1", "2"}
    told = {(p["batch_size"], p["depth"], p["task"]) for p in tuned["predictions"]}
    # Medusa has four heads: depth 9 is left out.
    assert told == {(b, d, t) for b in (1, 2) for d in (1, 2) for t in ("math", "chat", "all")}
    assert all(p["measured"] > 0 for p in tuned["predictions"])
    assert {"tuned.md", "tuned.html"} <= {path.name for path in run.iterdir()}
    page = (run / "tuned.md").read_text()
    assert page.index("Batch 1: ") < page.index("## Chosen depths") < page.index("## Speedup by")
    depth = tuned["batches"]["1"]["all"]["depth"]
    for choice in (tuned["batches"]["1"]["all"], *tuned["batches"]["1"]["tasks"].values()):
        choice["speculate"] = True  # two steps of training may not pay; see test_no_depth_pays.py
    (run / "tuned.json").write_text(json.dumps(tuned))
    assert main([*missing, "eval.name=tuned", "eval.lossless_prompts=0"]) == 0
    report = json.loads((run / "evaluations/tuned/report.json").read_text())
    assert report["depth"] == depth
    capsys.readouterr()
    assert main(["export", f"run.dir={run}", "export.num_speculative_tokens=auto"]) == 0
    assert f'"num_speculative_tokens": {depth}' in capsys.readouterr().out.replace("\n", "")


def test_tune_decodes_the_prompts_to_count_what_each_rank_accepts(run: Path) -> None:
    given = [f"run.dir={run}", prompts_of(run), *SHORT, *QUICK, "eval.policy=optimal_tree"]
    counts = count_ranks(set_up(typed(compose("tune", given), TuneConfig)), 2)
    assert counts.keys() == {prompt["task"] for prompt in PROMPTS}
    assert all(each.reached[0] > 0 for each in counts.values())


def test_tune_makes_the_fastest_trees_and_evaluate_takes_them_task_by_task(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = ["eval.policy=optimal_tree", "eval.tree_nodes=6", "eval.tree_width=2"]
    common = [f"run.dir={run}", prompts_of(run), *SHORT, *policy]
    arguments = ["tune", *common, "tune.depths=[1,2]", "tune.batch_sizes=[1,2]"]
    arguments += ["tune.contexts=[8]", "tune.rounds=1", "tune.overwrite=true"]
    assert main(arguments) == 0
    assert not list((run / "tune").glob("trees.*"))  # only of a tune that has not ended
    file = run / "tuned.json"
    tuned = json.loads(file.read_text())
    for size, depth in product("12", "12"):
        tree = tuned["trees"][size][depth]
        assert len(tree) <= 6
        assert max(map(len, tree)) == int(depth)
        assert max(rank for path in tree for rank in path) < 2
    tuned["batches"]["1"]["all"] |= {"depth": 2, "speculate": True}
    tuned["batches"]["1"]["tasks"] = {
        "math": {"depth": 1, "speedup": 1.0, "speculate": True},
        "chat": {"depth": 2, "speedup": 1.0, "speculate": True},
    }
    tuned["trees"]["1"] = {"1": [[0], [1]], "2": [[0], [1], [0, 0], [1, 0]]}
    file.write_text(json.dumps(tuned))
    capsys.readouterr()
    arguments = ["evaluate", *common, "eval.name=trees", "eval.depth=auto"]
    assert main(arguments) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "tasks drafted as `tune` chose for them: math: static tree of 2 nodes" in told
    report = json.loads((run / "evaluations/trees/report.json").read_text())
    assert report["depth"] == 2
    assert report["tree"] == "static tree of 2 + 2 nodes"
    [measured] = (run / "evaluations/trees").glob("*.measurements.jsonl")
    drafted = {
        result["task"]: {nodes for _, nodes, _ in result["stats"]["cycles"]}
        for line in measured.read_text().splitlines()
        for result in json.loads(line).get("results", [])
        if result["method"] != "autoregressive" and not result["method"].startswith("ngram")
    }
    assert max(drafted["math"]) == 2
    assert max(drafted["chat"]) == 4
    assert report["lossless"]["greedy_identical"] == report["lossless"]["greedy_total"]
    assert main([*arguments, "eval.tree_nodes=5", "eval.name=other"]) == 2
    assert "it was chosen under eval.policy=optimal_tree" in capsys.readouterr().err
    assert main([*arguments[:-1], "eval.depth=3", "eval.name=other"]) == 2
    assert "eval.depth must be auto or one that `tune` made a tree for: 1, 2, got 3" in (
        capsys.readouterr().err
    )
    file.unlink()


def test_tune_makes_the_longest_trees_where_it_is_asked_to(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = RankCounts([1000, 600], [[600, 100], [500, 50]])
    monkeypatch.setattr(tune, "count_ranks", lambda *_: {"math": counted})
    monkeypatch.setattr(tune, "predicted_times", lambda *_: lambda tree: float(tree.num_nodes))
    given = [f"run.dir={run}", prompts_of(run), *SHORT, *QUICK, "eval.policy=optimal_tree"]
    given += ["eval.tree_nodes=6", "eval.tree_width=2", "tune.contexts=[8]"]
    for asked, nodes in (("fastest", 2), ("longest", 6)):  # a second choice does not pay here
        config = typed(compose("tune", [*given, f"tune.trees={asked}"]), TuneConfig)
        found = tune.optimal_trees(set_up(config), config.tune, [2], [1])[1][2]
        assert (found.tree.depth, found.tree.num_nodes) == (2, nodes)


def test_a_report_names_the_temperature_that_ranked_a_dynamic_tree(run: Path) -> None:
    told = ["evaluate", f"run.dir={run}", prompts_of(run), *SHORT, "eval.policy=dynamic_tree"]
    told += ["eval.tree_nodes=6", "eval.tree_width=2", "eval.tree_temperature=0.5"]
    assert main([*told, "eval.name=ranked"]) == 0
    report = json.loads((run / "evaluations/ranked/report.json").read_text())
    assert report["tree"] == "dynamic tree of 6 nodes, 3 deep, 2 wide, ranked at temperature 0.5"
    assert report["lossless"]["greedy_identical"] == report["lossless"]["greedy_total"]
    assert "ngram" in report["methods"], "which finds its proposals in a shape of its own"


def test_an_adaptive_chain_takes_what_tune_timed(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = [f"run.dir={run}", prompts_of(run), *SHORT]
    adaptive = ["evaluate", *common, "eval.policy=adaptive", "eval.depth=auto", "eval.name=paced"]
    assert main(adaptive) == 2
    assert "eval.policy=adaptive takes what `tune` chose from" in capsys.readouterr().err
    arguments = ["tune", *common, "tune.depths=[1,3]", "tune.batch_sizes=[1]"]
    arguments += ["tune.contexts=[8]", "tune.rounds=1", "tune.overwrite=true"]
    assert main(arguments) == 0
    assert main([*adaptive, "eval.certify=true"]) == 0
    report = json.loads((run / "evaluations/paced/report.json").read_text())
    assert report["depth"] == 3
    assert report["lossless"]["greedy_identical"] == report["lossless"]["greedy_total"]
    assert all(check["passed"] is not False for check in report["certificate"]["checks"])
    capsys.readouterr()
    assert main([*adaptive[:-2], "eval.depth=4"]) == 2
    assert "eval.depth must be auto or at most 3, the deepest that" in capsys.readouterr().err
    assert main([*adaptive, "eval.latency_ms=0"]) == 2
    assert "eval.latency_ms must be above 0, or null, got 0" in capsys.readouterr().err
    file = run / "tuned.json"
    tuned = json.loads(file.read_text())
    tuned["costs_ms"]["draft"].pop()
    file.write_text(json.dumps(tuned))
    assert main([*adaptive, "eval.overwrite=true"]) == 2
    told = capsys.readouterr().err
    assert "tuned.json must be what `tune` wrote, but its costs must have every depth" in told
    file.unlink()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval.depth=9"], "eval.depth must be in 1..4 for drafter=medusa, got 9"),
        (["eval.depths=[1,9]"], "eval.depths must be in 1..4 for drafter=medusa, got 9"),
        (["eval.name=../other"], "eval.name must be a name without slashes"),
        (["eval.name=''"], "eval.name must not be empty"),
        (["eval.temperature=1e-39"], "eval.temperature must be 0 (greedy) or in [0.0001, 10], got"),
        (
            ["eval.rule=typical", "eval.temperatures=[0,1]", "eval.lossless_prompts=0"],
            "eval.lossless_prompts must be at least 1 with eval.rule=typical, got 0",
        ),
        (["eval.depth=0"], "eval.depth must be a number of at least 1, or auto, got 0"),
        (["eval.temperature=-1"], "eval.temperature must be 0 (greedy) or in [0.0001, 10], got -1"),
        (
            ["eval.temperatures=[0,99]"],
            "eval.temperatures must be 0 (greedy) or in [0.0001, 10]",
        ),
        (["eval.top_p=0"], "eval.top_p must be in (0, 1], got 0"),
        (["eval.draft_top_p=1.5"], "eval.draft_top_p must be in (0, 1], or null, got 1.5"),
        (
            ["eval.draft_temperature=-0.1"],
            "eval.draft_temperature must be 0 (greedy) or in",
        ),
        (["eval.rule=judge"], "eval.rule must be one of lossless, block, typical, lenience, got"),
        (
            ["eval.rule=block", "eval.policy=static_tree"],
            "eval.rule must not be block with eval.policy=static_tree",
        ),
        (["eval.rule=block", "eval.engine=vllm"], "eval.rule must not be block with eval.engine"),
        (
            ["eval.policy=bush"],
            "eval.policy must be one of auto, chain, static_tree, dynamic_tree, optimal_tree, "
            "adaptive",
        ),
        (["eval.policy=static_tree", "eval.tree=[2]"], "eval.tree must have 3 levels"),
        (["eval.policy=static_tree", "eval.tree=[0,1,1]"], "eval.tree must be numbers of at least"),
        (
            ["eval.policy=static_tree", "eval.tree=[99,99,1]"],
            "eval.tree must make at most 1,024 nodes",
        ),
        (["eval.policy=dynamic_tree", "eval.tree_nodes=0"], "eval.tree_nodes must be in 3..1024"),
        (["eval.policy=dynamic_tree", "eval.tree_width=0"], "eval.tree_width must be in 1..eval"),
        (
            ["eval.policy=dynamic_tree", "eval.tree_temperature=0"],
            "eval.tree_temperature must be at least 0.0001, got 0.0",
        ),
        (
            ["eval.policy=dynamic_tree", "eval.draft_temperature=1"],
            "eval.draft_temperature must be 0 or null with eval.policy=dynamic_tree",
        ),
        (
            ["eval.policy=dynamic_tree", "eval.tree_width=600", "eval.tree_nodes=800"],
            "eval.tree_width must be at most",
        ),
        (
            ["eval.policy=static_tree", "eval.engine=vllm"],
            "eval.policy must be chain with eval.engine=vllm",
        ),
        (["eval.lenience=0"], "eval.lenience must be in (0, 1], got 0"),
        (["eval.batch_size=0"], "eval.batch_size must be at least 1, got 0"),
        (["eval.batch_sizes=[2,2]"], "eval.batch_sizes must be distinct values, got [2, 2]"),
        (["eval.stop_strings=['']"], "eval.stop_strings must not be empty, got"),
        (["eval.certify=true", "eval.lossless_prompts=0"], "eval.lossless_prompts must be at"),
        (["eval.max_new_tokens=600"], "eval.max_new_tokens must be at most 510, got 600"),
        (["eval.max_new_tokens=500"], "eval.prompts: sum may need"),
        (["eval.prompts=broken.jsonl"], "eval.prompts=broken.jsonl must be usable in every line"),
        (["eval.prompts=/nowhere.jsonl"], "eval.prompts must name a file of prompts"),
        (["eval.two_model=/nowhere"], "/nowhere"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line_and_nothing_is_written(
    arguments: list[str],
    message: str,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "broken.jsonl").write_text(json.dumps(PROMPTS[0]) + '\n{"id": "b", "task": \n')
    monkeypatch.chdir(tmp_path)
    before = {path: path.stat().st_mtime for path in run.rglob("*")}
    ours = ["evaluate", f"run.dir={run}", prompts_of(run), *SHORT, "eval.name=refused"]
    assert main([*ours, *arguments]) in (1, 2)
    told = capsys.readouterr().err.strip()
    assert message in told, told
    assert len(told.splitlines()) == 1, told
    assert {path: path.stat().st_mtime for path in run.rglob("*")} == before
