"""The rewards inside TRL's trainer: a failure of an endpoint or of a comparison changes no other score."""

import os
import signal

import pytest

from grpo_rewards.judge import JudgeScore
from grpo_rewards.math import symbolic
from grpo_rewards.math.correctness import MathCorrectness
from tests.support.chat_server import completion, serving

pytestmark = pytest.mark.slow
trl = pytest.importorskip("trl")


def trained(reward_funcs, rows, folder, batch, trainer=trl.GRPOTrainer):
    """Return a trainer after three steps of a random Llama of a few thousand parameters, with groups of four."""
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.support.tiny import chat_tokenizer

    config = LlamaConfig(
        vocab_size=258, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=128, pad_token_id=257, eos_token_id=257,
    )  # fmt: skip
    args = trl.GRPOConfig(
        output_dir=str(folder), max_steps=3, per_device_train_batch_size=batch, num_generations=4, logging_steps=1,
        max_completion_length=4, use_cpu=True, bf16=False, report_to="none", save_strategy="no",
    )  # fmt: skip
    made = trainer(model=LlamaForCausalLM(config), processing_class=chat_tokenizer(template=None), args=args,
                   reward_funcs=reward_funcs, train_dataset=Dataset.from_list(rows))  # fmt: skip
    made.train()
    assert made.state.global_step == 3
    return made


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def test_a_run_survives_a_runaway_formula_and_a_killed_server(tmp_path):
    scores, reward = [], MathCorrectness(deadline=0.5)

    def troubled(prompts, completions, **columns):
        if len(scores) == 1:
            os.kill(symbolic._server().pid, signal.SIGKILL)
        texts = ["\\boxed{10^{10^{10}}}", "\\boxed{1+x}", *completions[2:]]
        scores.append(reward(prompts=prompts, completions=texts, **columns))
        return scores[-1]

    trainer = trained([troubled], [{"prompt": "x plus one?", "answer": "x+1"}] * 8, tmp_path, 4)
    assert scores == [[0.0, 1.0, 0.0, 0.0]] * 3
    assert logged(trainer, "rewards/math_correctness/timeouts") == [1.0] * 3
    assert logged(trainer, "rewards/math_correctness/symbolic") == [0.5] * 3


def test_a_group_without_scores_of_the_judge_is_scored_by_the_other_reward(tmp_path):
    requests, judged, rewarded = [], [], []

    def answer(request, handler):
        # One completion of the first step's two groups is rejected, then the judge answers, then it is down.
        requests.append(request)
        if len(requests) == 3:
            return 400, b"this one is too long"
        return (200, completion('{"score": 10}')) if len(requests) <= 16 else (503, b"")

    def length(prompts, completions, **columns):
        return [float(len(text)) for text in completions]

    class Trainer(trl.GRPOTrainer):
        def _calculate_rewards(self, *args):
            rewarded.append(super()._calculate_rewards(*args))
            return rewarded[-1]

    with serving(answer) as server:
        reward = JudgeScore(server.url, "m", num_generations=4, concurrency=1, attempts=1)

        def judge(prompts, completions, **columns):
            judged.append(reward(prompts, [f"{i} {text}" for i, text in enumerate(completions)], **columns))
            return judged[-1]

        trainer = trained([judge, length], [{"prompt": f"say {i}"} for i in range(8)], tmp_path, 8, Trainer)
    lost, kept = [None] * 4, [1.0] * 4
    assert judged == [lost + kept, kept + kept, lost + lost]
    for per_function, scores in zip(rewarded, judged, strict=True):
        assert per_function[:, 0].isnan().tolist() == [score is None for score in scores]
        assert not per_function[:, 1].isnan().any()
    assert logged(trainer, "rewards/judge/groups_lost") == [1.0, 0.0, 2.0]
