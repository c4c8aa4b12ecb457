"""`grpo_recipes.train`, which also records how many elements of the parameters each rank holds."""

import json
import os
from pathlib import Path
from typing import Any

from grpo_recipes import GRPOTrainer, train
from grpo_recipes.run import build


class Counting(GRPOTrainer):
    def train(self, *args: Any, **kwargs: Any) -> Any:
        result = super().train(*args, **kwargs)
        held = sum(getattr(parameter, "ds_tensor", parameter).numel() for parameter in self.model.parameters())
        file = Path(self.args.output_dir, f"elements-rank{os.environ['RANK']}.json")
        file.write_text(json.dumps(held))
        return result


if __name__ == "__main__":
    build.GRPOTrainer = Counting  # type: ignore[misc]
    train.leave(train.main())
