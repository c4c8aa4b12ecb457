"""Word problems in GSM8K's schema, made up: as many as a test asks for."""

import random


def gsm8k_rows(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Return rows with GSM8K's answers: calculations between `<<` and `>>`, thousands commas, a few below zero."""
    generator = random.Random(seed)
    rows = []
    for number in range(count):
        bags, each = generator.randint(2, 60), generator.choice([5, 12, 40, 250])
        spent = generator.randint(1, bags * each) + (number % 500 == 0) * bags * each  # every 500th is a loss
        made, left = bags * each, bags * each - spent
        question = f"Ann sells {bags} bags at ${each} each and spends ${spent:,}. How many dollars has she gained?"
        working = f"She sells for {bags}*{each}=$<<{bags}*{each}={made}>>{made:,}.\n"
        working += f"She has gained {made}-{spent}=$<<{made}-{spent}={left}>>{left:,}."
        rows.append({"question": question, "answer": f"{working}\n#### {left:,}"})
    return rows
