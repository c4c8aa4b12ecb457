"""grpo-rewards alone runs without torch, and so do its tests, but for those of the extra `models`."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("torch") else ["test_internlm2.py", "test_reward_model.py"]
