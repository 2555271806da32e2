"""The witness but for vLLM itself: what the worker says is read, compared, predicted, shown."""

import json
import signal
import stat
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import BY_TEMPLATE, drafter_config
from paths import ROOT
from test_evaluate import settings
from test_report import built

from drafttrain.core.chance import SeededChance
from drafttrain.core.sampling_config import GREEDY
from drafttrain.core.types import Counters, PromptResult
from drafttrain.data.evaluation_prompts import Prompt
from drafttrain.decode.autoregressive import autoregressive_decode
from drafttrain.decode.loop import speculative_decode
from drafttrain.drafters.base import Drafter
from drafttrain.evaluation.evaluate import Parts
from drafttrain.evaluation.witness.compare import (
    TIE_GAP,
    Ours,
    compare_with_ours,
    predict,
)
from drafttrain.evaluation.witness.engine import (
    SPECULATIVE,
    BatchWitness,
    EngineMeasurement,
    ServedDrafter,
    witness,
)
from drafttrain.evaluation.witness.section import (
    WitnessPrompt,
    asked_of,
    check_witness,
    witness_section,
)
from drafttrain.report.document import markdown
from drafttrain.report.pages import report_document
from drafttrain.report.results import BothSeconds, WitnessSection
from drafttrain.report.tables import with_witness, witness_table
from drafttrain.report.write import as_data, as_json, html
from drafttrain.target.model import Target
from drafttrain.target.vllm.process import find_python, meaningful_line
from drafttrain.target.vllm.worker import batches_of, difference

CONF = ROOT / "conf"
DEPTH, LIMIT = 3, 12


def stand_in(folder: Path, body: str) -> str:
    """Write a program that takes an interpreter's arguments and says what a worker might."""
    program = folder / "python"
    program.write_text(f"#!{sys.executable}\nimport json, os, sys, time\n{body}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return str(program)


def ask(python: str, folder: Path, **changes: Any) -> Any:
    asked: dict[str, Any] = {
        "depth": DEPTH,
        "sampling": GREEDY,
        "max_new_tokens": LIMIT,
        "dtype": "float32",
        "eos_ids": [5],
        "threads": 1,
        "folder": folder / "vllm",
        "batch_sizes": (1, 2),
    }
    served = ServedDrafter(folder, None, "ngram", changes.pop("lookup", None), True, python)
    return witness(served, [[1, 2, 3], [1, 2], [4]], **{**asked, **changes})


def event(method: str, size: int, places: list[int], **more: Any) -> dict[str, Any]:
    return {
        "event": "batch",
        "method": method,
        "batch_size": size,
        "repeat": 0,
        "prompts": places,
        "tokens": [[7, 8, 9] for _ in places],
        "seconds": 0.5,
        "decode_seconds": [0.25 for _ in places],
        "num_steps": None,
        "counters": None,
        **more,
    }


def counted(drafts: int, per_position: list[int]) -> dict[str, Any]:
    return {
        "num_drafts": drafts,
        "num_draft_tokens": drafts * DEPTH,
        "num_accepted_tokens": sum(per_position),
        "num_accepted_tokens_per_pos": per_position,
    }


def replay(folder: Path, events: Sequence[Mapping[str, Any]]) -> str:
    """Return a program that says these events."""
    (folder / "events.json").write_text(json.dumps(list(events)))
    path = str(folder / "events.json")
    return stand_in(folder, f"for e in json.load(open({path!r})): print(json.dumps(e), flush=True)")


def whole(*batches: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    first = {"event": "vllm", "version": "0.32.0", "together": True}
    return [first, *batches, {"event": "done"}]


def test_what_the_worker_says_becomes_seconds_and_counters(tmp_path: Path) -> None:
    drafted = [
        event(SPECULATIVE, 1, [place], num_steps=3, counters=counted(2, [1, 0, 0]))
        for place in range(3)
    ]
    again = [{**one, "repeat": 1, "seconds": 1.5, "tokens": [[7, 7, 7]]} for one in drafted]
    pair = [
        event(SPECULATIVE, 2, [0, 1], num_steps=4, counters=counted(4, [2, 1, 0])),
        event(SPECULATIVE, 2, [2], num_steps=4, counters=counted(1, [0, 0, 0])),
    ]
    plain = [event("plain", 1, [p]) for p in range(3)]
    plain += [event("plain", 2, [0, 1]), event("plain", 2, [2])]
    found = ask(replay(tmp_path, whole(*drafted, *again, *pair, *plain)), tmp_path, repeats=2)
    assert found.vllm == "0.32.0"
    assert found.interleaved
    alone, two = found.at(1), found.at(2)
    assert alone is not None
    assert two is not None
    assert alone.passes == (2, 2, 2)  # the prefill is a step, but no pass of a cycle
    assert alone.counters == Counters(6, 18, 3, [3, 0, 0])
    assert alone.by_prompt == (Counters(2, 6, 1, [1, 0, 0]),) * 3
    assert alone.speculative.seconds == (1.0, 1.0, 1.0)  # the median of two repeats
    assert alone.speculative.tokens == ((7, 8, 9),) * 3
    assert alone.speculative.num_unstable == 3
    assert two.plain.seconds == (0.25, 0.25, 0.5)
    assert two.counters == Counters(5, 15, 3, [2, 1, 0])
    assert two.by_prompt is None


def test_a_token_beyond_the_vocabulary_is_named(tmp_path: Path) -> None:
    answer = [event(m, 1, [p], num_steps=1) for p in range(3) for m in ("plain", SPECULATIVE)]
    for one in answer:
        one["counters"] = counted(0, [])
    answer[3]["tokens"] = [[7, 4096, 8]]
    python = replay(tmp_path, whole(*answer))
    with pytest.raises(ValueError, match=r"which has 4,096, got token 4,096; use another version"):
        ask(python, tmp_path, batch_sizes=(1,), vocab_size=4096)
    assert ask(python, tmp_path, batch_sizes=(1,), vocab_size=4097).at(1) is not None


def test_the_request_says_all_that_the_worker_needs(tmp_path: Path) -> None:
    answer = [event(m, 1, [p], num_steps=1) for p in range(3) for m in ("plain", SPECULATIVE)]
    for one in answer:
        one["counters"] = counted(0, [])
    ask(replay(tmp_path, whole(*answer)), tmp_path, batch_sizes=(1,), lookup=(1, 3))
    request = json.loads((tmp_path / "vllm" / "vllm_request.json").read_text())
    assert request["max_model_len"] == 3 + LIMIT + DEPTH + 1
    assert request["tensor_parallel"] == 1
    assert request["stop_tokens"] == [5]
    assert request["speculative_config"] == {
        "method": "ngram",
        "num_speculative_tokens": DEPTH,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 3,
    }


def test_drafts_can_be_sampled_and_a_method_be_read_from_the_directory() -> None:
    served = ServedDrafter(Path(), Path("d"), None, None, greedy_drafts=False, python="")
    assert served.speculation(4) == {
        "num_speculative_tokens": 4,
        "model": "d",
        "draft_sample_method": "probabilistic",
    }


def test_a_vllm_that_crashes_is_one_line_with_the_reason_and_the_log(tmp_path: Path) -> None:
    body = (
        "print('Traceback (most recent call last):', file=sys.stderr)\n"
        "print('ValueError: the KV cache is too small', file=sys.stderr)\n"
        "print('[rank0] destroy_process_group() was not called', file=sys.stderr)\n"
        "sys.exit(3)"
    )
    with pytest.raises(ValueError, match=r"ended with code 3.*the KV cache is too small") as raised:
        ask(stand_in(tmp_path, body), tmp_path)
    assert "\n" not in str(raised.value)
    assert str(tmp_path / "vllm" / "vllm.log") in str(raised.value)
    assert "destroy_process_group" in (tmp_path / "vllm" / "vllm.log").read_text()


def test_an_error_that_the_worker_names_comes_before_the_log(tmp_path: Path) -> None:
    said = {"event": "error", "text": "ValueError: no such architecture"}
    body = f"print({json.dumps(said)!r}); print('Error: noise', file=sys.stderr); sys.exit(1)"
    with pytest.raises(ValueError, match="code 1: ValueError: no such architecture; the log"):
        ask(stand_in(tmp_path, body), tmp_path)


def test_an_error_that_points_up_is_looked_up_in_the_log(tmp_path: Path) -> None:
    said = {"event": "error", "text": "RuntimeError: See root cause above."}
    body = (
        "print('AssertionError: shapes differ', file=sys.stderr)\n"
        "print('RuntimeError: See root cause above.', file=sys.stderr)\n"
        f"print({json.dumps(said)!r}); sys.exit(1)"
    )
    with pytest.raises(ValueError, match="AssertionError: shapes differ"):
        ask(stand_in(tmp_path, body), tmp_path)


def test_a_killed_vllm_names_the_signal(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"killed by signal {int(signal.SIGKILL)}"):
        ask(stand_in(tmp_path, "os.kill(os.getpid(), 9)"), tmp_path)


def test_an_environment_without_vllm_is_named(tmp_path: Path) -> None:
    said = {"event": "error", "text": "ModuleNotFoundError: No module named 'vllm'"}
    body = f"print({json.dumps(said)!r}); sys.exit(1)"
    with pytest.raises(ValueError, match=r"eval\.vllm_python must name.*cannot be imported"):
        ask(stand_in(tmp_path, body), tmp_path)


def test_a_vllm_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    body = (
        "print(json.dumps({'event': 'vllm', 'version': '1', 'together': True}), flush=True)\n"
        "child = os.fork()\n"
        f"open({str(tmp_path / 'pids')!r}, 'a').write(f'{{os.getpid()}} ')\n"
        "print('Error: waiting', file=sys.stderr, flush=True)\n"
        "time.sleep(600)"
    )
    started = time.monotonic()
    with pytest.raises(ValueError, match=r"printed nothing for 3 s.*vllm\.log.*Error: waiting"):
        ask(stand_in(tmp_path, body), tmp_path, patience_s=3.0)
    assert time.monotonic() - started < 60
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    for _ in range(100):
        alive = [pid for pid in pids if running(pid)]
        if not alive:
            break
        time.sleep(0.05)
    assert not alive


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def test_what_is_no_event_ends_the_worker(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"eval\.vllm_python must run.*'Python 2\.7'"):
        ask(stand_in(tmp_path, "print('Python 2.7'); sys.stdout.flush(); time.sleep(9)"), tmp_path)


def test_a_worker_that_stops_short_of_done_failed(tmp_path: Path) -> None:
    first = {"event": "vllm", "version": "1", "together": True}
    with pytest.raises(ValueError, match="vLLM ended with code 0: nothing"):
        ask(replay(tmp_path, [first]), tmp_path)


def test_the_last_line_that_names_an_error_is_found(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("INFO a\nKeyError: 'x'\n\nINFO b\n")
    assert meaningful_line(log) == "KeyError: 'x'"
    log.write_text("INFO a\n\n")
    assert meaningful_line(log) == "INFO a"


def test_the_interpreter_is_that_of_the_setting_then_of_the_variable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DRAFTTRAIN_VLLM_PYTHON", sys.executable)
    assert find_python(None) == sys.executable
    mine = stand_in(tmp_path, "")
    assert find_python(mine) == mine
    with pytest.raises(ValueError, match=r"eval\.vllm_python must name.*got '/no/such'"):
        find_python("/no/such")
    monkeypatch.setenv("DRAFTTRAIN_VLLM_PYTHON", "/no/python")
    with pytest.raises(ValueError, match=r"DRAFTTRAIN_VLLM_PYTHON must name.*got '/no/python'"):
        find_python(None)
    monkeypatch.delenv("DRAFTTRAIN_VLLM_PYTHON")
    with pytest.raises(ValueError, match=r"pip install vllm.*eval\.vllm_python=VENV"):
        find_python(None)


def test_the_worker_deals_prompts_and_reads_differences() -> None:
    request = {"prompts": [[1]] * 5, "batch_sizes": [1, 4], "repeats": 2}
    dealt = list(batches_of(request))
    assert [places for size, repeat, places in dealt if (size, repeat) == (4, 1)] == [
        [0, 1, 2, 3],
        [4],
    ]
    assert sum(len(places) for _, _, places in dealt) == 20
    assert difference({"a": 5, "p": [3, 1]}, {"a": 2}) == {"a": 3, "p": [3, 1]}
    assert difference({"a": 5, "p": [3, 1]}, {"a": 2, "p": [1, 1]}) == {"a": 3, "p": [2, 0]}


# Comparing


def one(tokens: tuple[int, ...], counters: Counters) -> Ours:
    return Ours("p", tokens, counters, 1)


def never(place: int, position: int) -> tuple[float, float]:
    raise AssertionError("nothing to audit")


def test_equal_counters_agree_however_they_are_padded() -> None:
    ours = [one((1, 2), Counters(1, 1, 1, [1]))]
    found = compare_with_ours(ours, [[1, 2]], [Counters(1, 1, 1, [1, 0, 0])], never)
    assert found.holds
    assert found.num_equal == 1


def test_other_counters_on_the_same_text_are_no_tie() -> None:
    ours = [one((1, 2), Counters(1, 3, 1, [1, 0, 0]))]
    found = compare_with_ours(ours, [[1, 2]], [Counters(1, 3, 0, [0, 0, 0])], never)
    assert not found.holds
    assert found.disagreements[0].position is None


@pytest.mark.parametrize(("gap", "tie"), [(1e-4, True), (0.1, False)])
def test_a_divergence_is_excused_by_a_near_tie_alone(gap: float, tie: bool) -> None:
    asked: list[tuple[int, int]] = []

    def gap_at(place: int, position: int) -> tuple[float, float]:
        asked.append((place, position))
        return gap, TIE_GAP

    same = Counters(1, 3, 1, [1, 0, 0])
    ours = [one((1, 2), same), one((1, 2, 3), same)]
    found = compare_with_ours(ours, [[1, 2], [1, 9, 3]], [same, Counters(2, 6, 0, [])], gap_at)
    assert asked == [(1, 1)]
    assert found.num_equal == 1
    assert found.disagreements[0].position == 1
    assert found.disagreements[0].tie is tie
    assert found.holds is tie


def test_an_output_that_ended_early_is_no_tie() -> None:
    same = Counters(1, 3, 1, [1, 0, 0])
    found = compare_with_ours([one((1, 2, 3), same)], [[1, 2]], [same], never)
    assert not found.holds
    assert found.disagreements[0].position == 2


def test_below_float32_tokens_alone_are_compared() -> None:
    ours = [one((1, 2), Counters(1, 3, 1, [1, 0, 0]))]
    other = [Counters(1, 3, 0, [0, 0, 0])]
    found = compare_with_ours(ours, [[1, 2]], other, never, "bfloat16")
    assert found.holds
    assert found.statement == "1 of 1 greedy outputs in bfloat16 have vLLM's tokens and ours alike."


# Predicting


def test_the_prediction_is_exact_where_times_and_acceptance_hold() -> None:
    """A made-up engine: 10 ms a step, 15 ms a cycle, 20 and 25 ms of prefill; 3 tokens a cycle."""
    tokens = tuple(tuple(range(1 + 3 * (4 + place))) for place in range(7))
    cycles = tuple(4 + place for place in range(7))
    decode = [tuple(0.010 * 3 * n for n in cycles), tuple(0.015 * n for n in cycles)]
    engines = [
        EngineMeasurement(tokens, tuple(s + prefill for s in spent), spent, 0)
        for spent, prefill in zip(decode, (0.020, 0.025), strict=True)
    ]
    alone = BatchWitness(1, engines[0], engines[1], Counters(), None, cycles)
    ours = [Ours("p", said, Counters(), n) for said, n in zip(tokens, cycles, strict=True)]
    found = predict(alone, ours)
    assert found is not None
    assert (found.num_calibration, found.num_test) == (3, 4)
    assert found.tokens_per_pass == pytest.approx(3.0)
    assert found.t_plain_s == pytest.approx(0.010)
    assert found.t_cycle_s == pytest.approx(0.015)
    assert found.predicted == pytest.approx(2.0)
    assert found.predicted_with_prefill == pytest.approx(found.measured)
    assert found.error == pytest.approx(0.0)
    # Our acceptance, not vLLM's, is what predicts.
    slower = predict(alone, [replace(o, num_passes=2 * o.num_passes) for o in ours])
    assert slower is not None
    assert slower.predicted == pytest.approx(1.0)
    assert predict(alone, ours[:1]) is None  # nothing left to test on


# The section of the report


@pytest.fixture(scope="module")
def lookup(target: Target) -> Drafter:
    return drafter_config("ngram").build(target.spec).eval()


PROMPTS = [
    Prompt(f"p{n}", "talk", "talk", ("the cat " * (n + 1), *["and a dog"] * (n % 2)))
    for n in range(6)
]


@pytest.fixture(scope="module")
def measured(target: Target, lookup: Drafter) -> list[PromptResult]:
    """What our own loop said, by the plain loop and by prompt lookup."""
    from drafttrain.data.chat import prompt_tokens
    from drafttrain.data.records import Message

    results = []
    told: dict[str, Any] = {
        "sampling": GREEDY,
        "max_new_tokens": LIMIT,
        "chance": SeededChance(0),
    }
    for prompt in PROMPTS:
        messages: list[Message] = []
        for turn, text in enumerate(prompt.turns):
            messages.append(Message("user", text))
            tokens = prompt_tokens(messages, target.tokenizer, BY_TEMPLATE)
            plain = autoregressive_decode(target, tokens, **told)
            drafted = speculative_decode(target, lookup, tokens, policy=DEPTH, **told)
            for method, decoded in (("autoregressive", plain), ("ngram", drafted)):
                length = len(tokens)
                results.append(
                    PromptResult(
                        prompt.id, turn, "talk", method, 0, length, decoded.tokens, decoded.stats
                    )
                )
            answer = target.tokenizer.decode(plain.tokens, skip_special_tokens=True)
            messages.append(Message("assistant", answer))
    return results


def test_later_turns_are_asked_as_our_loop_was(
    target: Target, measured: list[PromptResult]
) -> None:
    asked = asked_of(PROMPTS, measured, target, BY_TEMPLATE)
    plain = [result for result in measured if result.method == "autoregressive"]
    assert [(one.prompt_id, one.turn) for one in asked] == [(r.prompt_id, r.turn) for r in plain]
    assert [len(one.tokens) for one in asked] == [r.num_prompt_tokens for r in plain]
    later = [one for one in asked if one.turn == 1]
    assert later
    answer = target.tokenizer.decode(plain[1].tokens, skip_special_tokens=True)
    assert answer in target.tokenizer.decode(later[0].tokens)


def echo(asked: Sequence[WitnessPrompt], results: Sequence[PromptResult]) -> list[dict[str, Any]]:
    """Return the events of an engine that says and counts what our loop did."""
    mine = {(r.prompt_id, r.turn): r for r in results if r.method == "ngram"}
    events = []
    for place, prompt in enumerate(asked):
        result = mine[prompt.prompt_id, prompt.turn]
        counters = result.stats.untrimmed
        said: dict[str, Any] = {"tokens": [list(result.tokens)], "decode_seconds": [0.4]}
        events.append(event("plain", 1, [place], **said))
        drafted = {
            "num_drafts": counters.num_drafts,
            "num_draft_tokens": counters.num_draft_tokens,
            "num_accepted_tokens": counters.num_accepted_tokens,
            "num_accepted_tokens_per_pos": counters.num_accepted_tokens_per_position,
        }
        steps = 1 + result.stats.num_target_passes
        more = {**said, "counters": drafted, "num_steps": steps, "seconds": 0.25}
        events.append(event(SPECULATIVE, 1, [place], **{**more, "decode_seconds": [0.2]}))
    return events


def section_of(
    target: Target,
    lookup: Drafter,
    results: list[PromptResult],
    python: str,
    folder: Path,
) -> WitnessSection:
    config = settings(depth=DEPTH, max_new_tokens=LIMIT, vllm_batch_sizes=[1])
    return witness_section(
        Parts(target, target, lookup, "ngram", torch.float32, {}),
        ServedDrafter(folder, None, "ngram", (1, 3), True, python),
        asked_of(PROMPTS, results, target, BY_TEMPLATE),
        results,
        config,
        threads=1,
        folder=folder,
        seed=0,
        ours_by_batch={},
    )


def test_the_section_sets_vllm_beside_our_loop(
    target: Target, lookup: Drafter, measured: list[PromptResult], tmp_path: Path
) -> None:
    asked = asked_of(PROMPTS, measured, target, BY_TEMPLATE)
    python = replay(tmp_path, whole(*echo(asked, measured)))
    section = section_of(target, lookup, measured, python, tmp_path)
    assert section.agreement.holds is True
    assert section.agreement.ours == section.agreement.theirs
    (row,) = section.batches
    assert row.ours is not None
    assert row.mean_acceptance_length.value == pytest.approx(row.ours.mean_acceptance_length)
    assert row.speedup.value == pytest.approx(2.0)
    assert row.seconds == BothSeconds(plain=0.5 * len(asked), drafted=0.25 * len(asked))
    assert section.prediction is not None
    assert section.prediction.measured == pytest.approx(2.0)
    table = witness_table(section)
    assert len(table.rows) == 1
    assert table.rows[0][0] == "1"
    assert f"{len(asked)} of {len(asked)} greedy outputs" in table.notes[0]
    assert any("earliest occurrence" in note for note in table.notes)


def test_the_section_names_what_vllm_counted_otherwise(
    target: Target, lookup: Drafter, measured: list[PromptResult], tmp_path: Path
) -> None:
    asked = asked_of(PROMPTS, measured, target, BY_TEMPLATE)
    events = echo(asked, measured)
    drafted = [one for one in events if one["method"] == SPECULATIVE]
    drafted[1]["counters"]["num_drafts"] += 1
    drafted[2]["tokens"][0][4] = (drafted[2]["tokens"][0][4] + 1) % 97
    python = replay(tmp_path, whole(*events))
    section = section_of(target, lookup, measured, python, tmp_path)
    assert section.agreement.holds is False
    assert section.agreement.num_equal == len(asked) - 2
    counts, text = section.agreement.disagreements
    assert counts.position is None
    assert text.position == 4
    assert text.gap is not None
    assert text.gap > 1e-3
    notes = witness_table(section).notes
    assert "2 for another reason" in notes[0]
    assert "other counters" in notes[1]
    assert "no tie" in notes[2]


def test_the_audited_gap_is_the_targets_own(
    target: Target, lookup: Drafter, measured: list[PromptResult], tmp_path: Path
) -> None:
    asked = asked_of(PROMPTS, measured, target, BY_TEMPLATE)
    events = echo(asked, measured)
    changed = events[1]["tokens"][0]
    text = [*asked[0].tokens, *changed[:4]]
    changed[4] = (changed[4] + 1) % 97
    section = section_of(target, lookup, measured, replay(tmp_path, whole(*events)), tmp_path)
    best = target.model(torch.tensor([text])).logits[0, -1].topk(2).values
    gap = section.agreement.disagreements[0].gap
    assert gap == pytest.approx(float(best[0] - best[1]), abs=1e-4)


def test_the_report_shows_the_table_in_every_form(
    target: Target, lookup: Drafter, measured: list[PromptResult], tmp_path: Path
) -> None:
    told: dict[str, Any] = {"drafter": "ngram", "depth": DEPTH, "max_new_tokens": LIMIT}
    report = built(measured, **told, resamples=100)
    asked = asked_of(PROMPTS, measured, target, BY_TEMPLATE)
    python = replay(tmp_path, whole(*echo(asked, measured)))
    section = section_of(target, lookup, measured, python, tmp_path)
    shown = with_witness(report, section)
    assert shown.vllm == section
    assert report.tables == []
    document = report_document(shown)
    for text in (markdown(document), html(document)):
        assert "vLLM beside our loop" in text
        assert "vLLM 0.32.0 with ngram at depth 3" in text
    data = json.loads(as_json(as_data(shown)))
    assert data["vllm"]["batches"][0]["ours"]["speedup"] == data["summary"]["speedup"]


# What vLLM cannot be asked


def checked(target: Target, lookup: Drafter, **changes: Any) -> ServedDrafter:
    values = {"drafter": lookup, "drafter_name": "ngram", "target_dir": Path(), "serving_dir": None}
    told = {key: changes.pop(key, value) for key, value in values.items()}
    return check_witness(config=settings(**{"vllm_python": sys.executable, **changes}), **told)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"drafter_name": "mine"}, "serves the drafters .*eagle3, .*got mine"),
        ({"target_dir": None}, "must have a directory with the target's weights"),
        ({"rule": "typical", "temperature": 1.0}, r"eval\.rule must be lossless"),
        ({"stop_strings": ["end"]}, r"eval\.stop_strings must be empty.*\['end'\]"),
        ({"vllm_python": "/no/such"}, r"eval\.vllm_python must name"),
    ],
)
def test_what_vllm_cannot_do_is_refused_before_anything_is_decoded(
    target: Target, lookup: Drafter, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        checked(target, lookup, **changes)


def test_a_drafter_within_its_target_is_served_from_the_directory_of_both(
    target: Target, lookup: Drafter
) -> None:
    drafter = drafter_config("mtp").build(target.spec)
    given: dict[str, Any] = {"drafter": drafter, "drafter_name": "mtp", "target_dir": Path("alone")}
    served = checked(target, lookup, **given, serving_dir=Path("both"))
    assert served.target_dir == Path("both")
    assert served.speculation(3) == {"method": "mtp", "num_speculative_tokens": 3}


def test_drafts_are_sampled_as_vllm_can(target: Target, lookup: Drafter) -> None:
    medusa = drafter_config("medusa").build(target.spec)
    warm: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9}
    heads: dict[str, Any] = {"drafter": medusa, "drafter_name": "medusa", **warm}
    assert checked(target, lookup, **heads, draft_temperature=0.0).greedy_drafts
    assert not checked(target, lookup, **heads).greedy_drafts
    with pytest.raises(ValueError, match=r"eval\.draft_temperature must be null"):
        checked(target, lookup, **heads, draft_temperature=0.5)
    served = checked(target, lookup, **warm)
    assert served.greedy_drafts  # a looked up draft is no sample
    assert served.lookup == (1, 3)
