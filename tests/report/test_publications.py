"""Published numbers of a family beside a report's own."""

import re

import pytest
from test_report import html, many_prompts, markdown, report_of

from drafttrain.drafters.dflash import DFlash
from drafttrain.drafters.dflash2 import DFlash2
from drafttrain.drafters.dspark import DSpark
from drafttrain.drafters.eagle import Eagle
from drafttrain.drafters.eagle3 import Eagle3
from drafttrain.drafters.hydra_heads import HydraHeads
from drafttrain.drafters.medusa import Medusa
from drafttrain.drafters.mtp import MTP
from drafttrain.drafters.shared.publications import Published
from drafttrain.drafters.two_model import TwoModel

QUOTED = Published("Llama", "tree", "chats", "MT-bench", "A100", 2.0, None, "arXiv:2401.00001")


def test_published_numbers_stand_below_our_own_with_what_differs() -> None:
    report = report_of(many_prompts(prompts=6), published=[QUOTED])
    text = markdown(report).split("## Published for this family")[1]
    ours, theirs = [line for line in text.splitlines() if line.startswith("| ")][2:4]
    speedup = report["summary"]["speedup"]["value"]
    assert ours.startswith("| this report | tiny | chain of 2 | see Provenance | 6 prompts, greedy")
    assert f"| {speedup:.2f} [" in ours
    assert theirs == (
        "| arXiv:2401.00001 | Llama | tree | chats | MT-bench | A100 | 2.00 | \N{EN DASH} |"
    )
    assert "Quoted, not measured here" in html(report)


def test_a_family_without_published_numbers_has_no_such_table() -> None:
    assert "Published for this family" not in markdown(report_of(many_prompts(prompts=6)))


@pytest.mark.parametrize(
    "family", [DFlash, DFlash2, DSpark, Eagle, Eagle3, HydraHeads, Medusa, MTP, TwoModel]
)
def test_every_quoted_number_has_a_source_and_is_plausible(family: type) -> None:
    sources = r"arXiv:\d{4}\.\d{5}(, table \d+)?|Spec-Bench leaderboard|[\w-]+/[\w-]+#\d+"
    for one in family.published:  # type: ignore[attr-defined]
        assert re.fullmatch(sources, one.source)
        assert all(vars(one)[name] for name in ("target", "drafts", "trained_on", "prompts"))
        assert 1 < (one.speedup or one.acceptance_length) < 10
        assert one.acceptance_length is None or one.acceptance_length > 1
