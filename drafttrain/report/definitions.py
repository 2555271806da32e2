"""Definitions of every number in a report, printed wherever the number is."""

from drafttrain.report.totals import FEWEST_PROMPTS

DEFINITIONS: dict[str, str] = {
    "num_prompts": "Prompts measured; the turns of one prompt count as one, and one prompt is the "
    "unit that the bootstrap resamples.",
    "num_turns": "Outputs measured: every turn of every prompt.",
    "num_output_tokens": "Tokens that reached the output, trimmed at the end token (which counts) "
    "and at the limit; each prompt counts once, however many timing blocks repeat it.",
    "num_target_passes": "Forward passes of the target after the prefill: one per cycle of draft "
    "and verification.",
    "num_drafts": "Proposals made; the prefill is not one.",
    "num_draft_tokens": "Nodes submitted to verification.",
    "num_accepted_tokens": "Drafted tokens that were accepted and reached the output, without the "
    "bonus token.",
    "num_cut_drafts": "Drafts that the end token or the limit cut: their bonus token did not reach "
    "the output.",
    "acceptance_length": "Tokens that a draft yields: accepted ones and, where nothing was cut, "
    "the bonus; the prefill is not counted (tau). vLLM, whose mean acceptance length is 1 + "
    "accepted / drafts, counts a bonus for a cut draft too. micro: over all drafts; macro: mean of "
    "the prompts' own lengths, prompts without a draft left out; ci95: interval of micro.",
    "acceptance_rate": "Accepted / drafted tokens; of a tree at most its depth / its nodes.",
    "by_member": "Of drafters that draft together: the drafts that have a token of this member, "
    "its tokens, and those accepted. A token of several members counts for the first; prompt "
    "lookup comes last.",
    "acceptance_per_position": "Share of all drafts whose i-th token was accepted (vLLM's rate per "
    "position).",
    "conditional_acceptance": "Share of the drafts whose first i - 1 tokens were accepted in which "
    "the i-th was accepted too (EAGLE's n-alpha); a draft that ended earlier counts as rejected.",
    "tokens_per_second": "Output tokens over seconds from first prompt token to last output "
    "token, prefill included. The passes of a prompt are counted; each counts at the median time "
    "of its kind (method, rows, proposal, range of contexts) over all prompts and blocks. "
    "autoregressive: the plain loop; speculative: with the drafter.",
    "speedup": "Tokens per second over those of the plain autoregressive loop: same process, "
    "prompts, batch, sampling, trimmed output; on a CPU the methods decode a prompt in turns of a "
    "few tokens. ci95: paired by prompt; blocks: the same prompts, with the median times of one "
    "timing block alone.",
    "predicted_speedup": "Tokens per pass * t_plain / (t_draft + t_verify), t_plain being the "
    "target's time for one plain step; it leaves out prefill and the loop's own time.",
    "break_even_length": "(t_draft + t_verify) / t_plain: the acceptance length from which "
    "speculation pays here, where every pass drafts.",
    "time_ms": "Milliseconds. draft, verify, other (the loop's own time): per target pass after "
    "the prefill; prefill: per turn. Means over passes or turns, each at the median of its kind. "
    "Plain decoding has verify (its step) and other.",
    "timing": "What the speeds were measured with; blocks: interleaved groups of prompts, each "
    "by all methods in turn; repeats: how many blocks timed each prompt, at the least.",
    "repetition_rate": "Share of output tokens that end a run of 4 tokens which stood earlier in "
    "the same output: text in loops is easy to draft.",
    "outside_repetition": "Acceptance over the drafts that began where the text does not repeat "
    "itself: their first position does not end a run of 4 tokens which stood earlier in the same "
    "output (text copied from the prompt is not repetition). A position's kind depends on the text "
    "alone, not on who drafted it. share_of_drafts: the drafts that are left.",
    "acceptance_length_difference_to_ngram": "Acceptance length minus that of prompt lookup "
    "(ngram), paired by prompt; all_text: of all drafts, outside_repetition: of those that began "
    "outside repetition. Passes in which prompt lookup found nothing to propose are no drafts, "
    "which flatters it; a method without any draft has length 1.",
    "tokens_per_pass_difference_to_ngram": "The same of the tokens of all target passes, those in "
    "which a method proposed nothing counted as the one token that they yield: what a drafter is "
    "worth where it is used throughout.",
    "outputs_differing": "Turns whose output is not, token for token, that of the plain loop in "
    "the timing dtype, out of how many; under sampling they may differ, their distribution may "
    "not.",
    "untrimmed": "The same counters with what lay past the end token or the limit, as vLLM counts "
    "them.",
    "ci95": "95 % interval by studentized bootstrap over prompts, which covers with few and "
    'skewed ones too; none, "too few", from '
    f"fewer than {FEWEST_PROMPTS} prompts. Prompts "
    "decoded together share their batch's time, so that intervals of speeds at batch sizes above 1 "
    "are somewhat too narrow.",
    "lossless": "Whether the verification rule leaves the target's distribution unchanged, and how "
    "many greedy outputs were token for token those of the plain loop, in the dtype stated there, "
    "which is not always the dtype of the timing.",
    "beats_ngram": "Speedup of the drafter minus speedup of prompt lookup (ngram), paired by "
    "prompt: a drafter that does not beat it is not worth its cost, whatever it has learned.",
    "money": "Price per hour over output tokens per hour, for a million of them: of one stream of "
    "batches as they were measured. A server that runs larger batches pays less per token, with "
    "and without a drafter. saving: share of the plain price that speculation saves.",
    "extra_memory": "Bytes besides the target's: the drafter's own weights, and its KV cache at "
    "num_positions, the longest prompt and output measured, times the rows of a batch. The "
    "target's cache is as large without a drafter, but for the drafted tokens.",
    "flags": "Rows to distrust: such as a speedup whose lower bound exceeds its acceptance length, "
    "which means that the plain loop was handicapped.",
}


# Follows the definition of a time per target pass where prompts were decoded together.
PER_ROW = (
    " Per row of the batch: a pass counts for each of its rows, with that row's equal share of its "
    "time."
)


def definitions(resamples: int, batch_size: int) -> dict[str, str]:
    """Return the definitions of one report, with the number of resamples behind its intervals."""
    return {
        **DEFINITIONS,
        "time_ms": DEFINITIONS["time_ms"] + PER_ROW * (batch_size > 1),
        "ci95": f"{DEFINITIONS['ci95']} Resamples: {resamples:,}.",
    }


# Definitions that only a comparison needs; the others are those of a report.
COMPARED: dict[str, str] = {
    "difference": "The row's value minus the baseline's (or the other row's), each the mean over "
    "its own training seeds; ci95: both resampled on the same prompts (paired). Intervals are not "
    "corrected for the number of comparisons.",
    "training": "Runs whose configuration and evaluation differ in nothing but run.seed (and name, "
    "folder, tracker and hardware) are seeds of one method. Their row is the mean over them; ci95 "
    "is of that mean over prompts, these seeds held fixed; range: lowest and highest of the seeds. "
    "Single run: nothing is known of how another seed would come out.",
    "reference": "A method that was measured beside the runs' own drafters, in the same process; "
    "where several runs did so, the mean over them, and the range says how well such a measurement "
    "repeats.",
    "num_prompts": "Prompts that every run decoded, matched by task and id; one prompt is the unit "
    "that the bootstrap resamples.",
    "drafter_parameters": "Numbers in the trained weights of the drafter, as its checkpoint holds "
    "them; what it shares with the target is not counted.",
    "training_tokens": "Tokens of all batches up to the evaluated checkpoint, those without loss "
    "too; mean over seeds.",
    "training_seconds": "Time of the optimizer steps up to the evaluated checkpoint, without "
    "validations and checkpoints, on the machine that trained; mean over seeds.",
    "draft_ms": "Milliseconds of the drafter per target pass after the prefill.",
}


def comparison_definitions(resamples: int, batch_size: int) -> dict[str, str]:
    """Return the definitions of a comparison: its own, and those shared with a report."""
    found = definitions(resamples, batch_size)
    reused = ["acceptance_length", "acceptance_rate", "tokens_per_second", "speedup", "ci95"]
    draft_ms = COMPARED["draft_ms"] + PER_ROW * (batch_size > 1)
    return {**{key: found[key] for key in (*reused, "lossless")}, **COMPARED, "draft_ms": draft_ms}


ADAPTATION = (
    "A drafter that started from another one (run.init_from), beside that one as it was: the same "
    "prompts, decoded by the same target in the same timing blocks. difference: after minus "
    "before; ci95: bootstrap over prompts, paired, so that a prompt is drawn with both."
)


def verdict_definition(marginal_speedup: float) -> str:
    """Return the definition of the verdicts of one report."""
    return (
        f"speculate: the lower bound of the speedup's 95 % interval is above {marginal_speedup:g}. "
        "do not: the speedup is at most 1, or nothing was drafted. marginal: what lies between, or "
        "has no interval, or whose plain loop was handicapped, or whose timing blocks disagree and "
        f"are not all above {marginal_speedup:g}. unknown: nothing was timed, or a speedup of at "
        "most 1 has no interval (too few prompts). Where a sweep measured several depths, the "
        "fastest was chosen on other prompts, which no number here is of."
    )
