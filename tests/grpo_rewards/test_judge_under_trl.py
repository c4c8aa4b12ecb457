"""The judge beside a second reward in TRL's trainer: a failure of the endpoint changes no advantage."""

import pytest

from grpo_rewards.judge import JudgeScore
from tests.support.chat_server import completion, serving

pytestmark = pytest.mark.slow
trl = pytest.importorskip("trl")


def test_a_group_without_scores_of_the_judge_is_scored_by_the_other_reward(tmp_path):
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.support.tiny import chat_tokenizer

    requests = []

    def answer(request, handler):
        # One completion of the first step's two groups is rejected, then the judge answers, then it is down.
        requests.append(request)
        if len(requests) == 3:
            return 400, b"this one is too long"
        return (200, completion('{"score": 10}')) if len(requests) <= 16 else (503, b"")

    judged, rewarded = [], []

    def length(prompts, completions, **columns):
        return [float(len(text)) for text in completions]

    config = LlamaConfig(
        vocab_size=258, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=128, pad_token_id=257, eos_token_id=257,
    )  # fmt: skip
    with serving(answer) as server:
        reward = JudgeScore(server.url, "m", num_generations=4, concurrency=1, attempts=1)

        class Watched(JudgeScore):
            def __call__(self, prompts, completions, **columns):
                judged.append(reward(prompts, [f"{i} {text}" for i, text in enumerate(completions)], **columns))
                return judged[-1]

        class Trainer(trl.GRPOTrainer):
            def _calculate_rewards(self, *args):
                rewarded.append(super()._calculate_rewards(*args))
                return rewarded[-1]

        trainer = Trainer(
            model=LlamaForCausalLM(config),
            processing_class=chat_tokenizer(template=None),
            reward_funcs=[Watched(server.url, "m"), length],
            args=trl.GRPOConfig(
                output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=8, num_generations=4,
                logging_steps=1, max_completion_length=4, use_cpu=True, bf16=False, report_to="none",
                save_strategy="no",
            ),
            train_dataset=Dataset.from_list([{"prompt": f"say {i}"} for i in range(8)]),
        )  # fmt: skip
        trainer.train()
    assert trainer.state.global_step == 3
    lost, kept = [None] * 4, [1.0] * 4
    assert judged == [lost + kept, kept + kept, lost + lost]
    for per_function, scores in zip(rewarded, judged, strict=True):
        assert per_function[:, 0].isnan().tolist() == [score is None for score in scores]
        assert not per_function[:, 1].isnan().any()
    logged = [
        entry["rewards/judge/groups_lost"]
        for entry in trainer.state.log_history
        if "rewards/judge/groups_lost" in entry
    ]
    assert logged == [1.0, 0.0, 2.0]
