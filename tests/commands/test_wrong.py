"""A hundred wrong command lines, over all commands: each is answered in one line and status 2."""

from pathlib import Path

import pytest

from drafttrain.__main__ import main

HUGE = "9" * 500
LONG = "x" * 300
# The first that no command knows; then, by command, what no value may be.
LINES = f"""
trian
generate
--hepl
train --config-dir=
train eagle
train =
train =3
train .=3
train run.=3
train +=3
train lr=1e-4
train drafter=
train drafter=[a]
train drafter={{a:1}}
train model=null
train run.name=
train run.name=..
train run.name=.
train run.name={LONG}
train run.name=[a]
train run.name=${{nope}}
train run.name=${{oc.env:NOT_SET_AT_ALL}}
train run.name=${{
train run.dir=
train run.dir=null
train run.seed=-1
train run.seed=10**400
train run.seed=1e400
train run.seed={HUGE}
train run.seed=true
train run.resume=maybe
train run.init_from=
train run.init_from=nowhere
train run.init_from=README.md
train run.init_from={LONG}
train trainer.lr=
train trainer.lr=nan
train trainer.lr=-inf
train trainer.lr=1e400
train trainer.lr=[1]
train trainer.lr=-1
train trainer.max_steps=1e9
train trainer.max_steps={HUGE}
train model.path=
train model.repo=not/a/valid/repo
train model.inflate=900Q
train model.inflate={HUGE}B
train model.shape=3
train data.path=
train data=jsonl
train data.holdout=-1
train data.max_length=nan
train data.template=maybe
train drafter.layers=[]
train drafter.layers=[1,1]
train drafter.layers={"[" * 300}
train drafter.losses={{}}
train drafter.losses={{soft_cross_entropy:.inf}}
train drafter.losses=3
train drafter.unroll=1e3
train drafter._target_=
train drafter._target_=3
train drafter._target_=[a]
train drafter._target_=os.system
train drafter._target_=drafttrain..os
train drafter=eagle,medusa
train features=stored features.dir=
train hardware.device=tpu
train hardware.ranks=1.5
train hardware.micro_batch=0
train deepspeed=zero9
train deepspeed.config.x=1
train deepspeed=zero2 deepspeed.config.zero_optimization=3
train deepspeed=zero2 deepspeed.config.zero_optimization.offload_optimizer=3
train tracker=wandb tracker.project=
train tracker=wandb tracker.tags=3
train eval.depth=0
train eval.temperatures=[nan]
train eval.stop_strings=['']
train vllm.memory=2
train vllm.patience=inf
train --slurm=Nodes=2
evaluate --slurm
evaluate
evaluate run.dir=
evaluate run.dir=null
evaluate run.dir=README.md
evaluate run.dir={LONG}
evaluate drafter.path=
evaluate drafter=ngram eval.name=..
evaluate drafter=ngram eval.prompts=
evaluate drafter=ngram eval.two_model=
evaluate drafter=ngram eval.top_p=2
tune
tune run.dir=nowhere
export run.dir=nowhere export.dir=
compare
compare runs=
compare runs=a
compare runs=[a,a]
compare runs=['']
compare runs=[a] compare.name=
compare runs=[nowhere]
compare runs=[README.md]
compare runs=[[a]]
compare runs=[empty] compare.evaluation=../x
capture
capture store.dir=
capture store.dir=s store.drafters=[]
capture store.dir=s store.shard_mb=nan
regenerate data.path=
regenerate data.path=talk.jsonl regenerate.out=
regenerate data.path=talk.jsonl regenerate.backend=openai regenerate.base_url=
regenerate data.path=talk.jsonl regenerate.timeout=nan
plan plan.measured=
plan plan.dir=
plan plan.batch_sizes=[]
plan plan.acceptance_length=nan
plan hardware.accelerator=
""".strip().splitlines()


def test_a_hundred_are_tried() -> None:
    assert len(LINES) == len(set(LINES)) >= 100


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[:60])
def test_a_wrong_command_line_is_answered_in_one_line(
    line: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").touch()
    (tmp_path / "empty").mkdir()
    assert main(line.split()) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    assert len(said.err) < 900
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "empty"]
