"""A reproduction for docs/upstream/trl-continuous-batching-cast.md."""

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

words = Tokenizer(
    models.WordLevel({word: number for number, word in enumerate(["<pad>", "<eos>", "1", "2", "3", "+", "="])}, "<pad>")
)
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
sizes = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
model = Qwen2ForCausalLM(Qwen2Config(vocab_size=7, **sizes))
args = GRPOConfig(
    "out",
    use_cpu=True,
    bf16=True,
    use_transformers_continuous_batching=True,
    learning_rate=1e-6,
    max_steps=1,
    num_generations=4,
    per_device_train_batch_size=4,
    max_completion_length=8,
    report_to="none",
    save_strategy="no",
    transformers_continuous_batching_config={"num_blocks": 8, "max_batch_tokens": 64},
)
trainer = GRPOTrainer(
    model,
    lambda completions, **columns: [float(len(text)) for text in completions],
    args,
    train_dataset=Dataset.from_dict({"prompt": ["1 + 2 ="] * 8}),
    processing_class=tokenizer,
)
print(next(model.parameters()).dtype)  # torch.float32
trainer.train()
print(next(model.parameters()).dtype)  # torch.bfloat16: the weights that are trained
