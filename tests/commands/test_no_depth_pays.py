"""Where `tune` chose not to speculate, `auto` obeys: the target decodes alone."""

import json
from pathlib import Path
from typing import Any

import pytest
from test_as_tuned import taken, tuned
from test_evaluation_commands import SHORT, prompts_of, run  # noqa: F401 (a fixture)

from drafttrain.__main__ import main
from drafttrain.runtime.run_folder import METRICS_FILE
from drafttrain.training.validation import BREAK_EVEN

AUTO = "eval.depth=auto"
NO = {"depth": 2, "speculate": False}


def chosen(everywhere: dict[str, Any], **tasks: dict[str, Any]) -> dict[str, Any]:
    batches = {"1": {"all": {"depth": 2} | everywhere, "tasks": tasks}}
    return tuned(weights="step-000002", batches=batches)


def put(folder: Path, content: dict[str, Any]) -> None:
    (folder / "tuned.json").write_text(json.dumps(content))


def test_a_task_is_drafted_unless_tune_chose_none_for_it(tmp_path: Path) -> None:
    found = taken(tmp_path, chosen({}, math=NO, chat={"depth": 4}), AUTO)
    assert (found.depth, list(found.of_tasks)) == (2, ["chat"])
    assert [found.drafts(task) for task in ("math", "chat", "another")] == [False, True, True]
    found = taken(tmp_path, chosen(NO, chat={"depth": 2}), AUTO)
    assert [found.drafts(task) for task in ("math", "chat")] == [False, True]
    assert taken(tmp_path, chosen(NO), "eval.depth=3").drafts("math")  # a number is obeyed
    # It begins a draft only where that pays.
    assert taken(tmp_path, chosen(NO), "eval.policy=adaptive", AUTO).drafts("math")


@pytest.mark.parametrize("other", ["eval.depths=[1,2]", "eval.engine=vllm"])
def test_what_needs_a_depth_is_refused_where_none_pays(other: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"eval\.depth must be a number with .* got auto: `tune`"):
        taken(tmp_path, chosen(NO), AUTO, other)


def test_commands_draft_nothing_where_no_depth_pays(
    run: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    put(run, chosen({}, math=NO))
    evaluate = ["evaluate", f"run.dir={run}", prompts_of(run), *SHORT[:-1], AUTO]
    assert main([*evaluate, "eval.name=one"]) == 0
    assert "tasks decoded plainly, where `tune` chose no depth: math" in capsys.readouterr().out
    report = json.loads((run / "evaluations/one/report.json").read_text())
    math, chat = report["tasks"]["math"], report["tasks"]["chat"]
    assert (math["num_drafts"], math["outputs_differing"]["num"]) == (0, 0)
    assert (
        math["num_target_passes"]
        == report["methods"]["autoregressive"]["tasks"]["math"]["num_target_passes"]
    )
    assert chat["num_drafts"] > 0
    assert report["verdicts"]["math"]["decision"] == "do not"
    assert "nothing was drafted" in report["verdicts"]["math"]["statement"]

    put(run, chosen(NO))
    assert main([*evaluate, "eval.name=none"]) == 0
    report = json.loads((run / "evaluations/none/report.json").read_text())
    assert report["summary"]["num_drafts"] == 0
    assert report["verdict"].startswith("Do not speculate (nothing was drafted)")
    capsys.readouterr()
    assert (
        main(["generate", f"run.dir={run}", "chat.prompt=Hi", "chat.max_new_tokens=3", AUTO]) == 0
    )

    export = ["export", f"run.dir={run}", f"export.dir={run / 'exported'}"]
    assert main([*export, "export.num_speculative_tokens=auto"]) == 2
    said = capsys.readouterr().err
    assert "export.num_speculative_tokens must be a number" in said
    assert "`tune` chose not to speculate" in said
    assert not (run / "exported").exists()
    for depth in ("2", "null"):
        told = [f"export.num_speculative_tokens={depth}", "export.overwrite=true"]
        assert main([*export, *told]) == 0
        assert "warning: `tune` chose not to speculate" in capsys.readouterr().out
    put(run, chosen(NO) | {"weights": "step-000001"})  # of other weights it says nothing
    metrics = run / METRICS_FILE  # without timed validations: their warning depends on the machine
    rows = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(row for row in rows if BREAK_EVEN not in row))
    assert main([*export, "export.num_speculative_tokens=2", "export.overwrite=true"]) == 0
    assert "warning" not in capsys.readouterr().out
