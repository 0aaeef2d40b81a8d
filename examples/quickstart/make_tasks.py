"""Make the quickstart's tasks: folders in Harbor's format, the same for the same arguments.

    python examples/quickstart/make_tasks.py --out DIR --count 64 --seed 0 [--start 0]

Every task is a card: `in.txt` holds a name, a colour and a size; the agent writes them to `out.txt` as equals lines and
a last line `done`. tests/test.sh gives a quarter of the reward for each line that is right. There are 1600 cards; the
seed shuffles them and `--start` tells where in that order this set begins, so that a held-out set shares no card.
"""

import argparse
import random
from itertools import product
from pathlib import Path

NAMES = "ada ben cleo dan eva finn gus hana ivan jade kai lena milo nora otto pia".split()
COLORS = "red blue lime gold pink teal gray plum rust jade".split()
SIZES = "0123456789"
CARDS = list(product(NAMES, COLORS, SIZES))

INSTRUCTION = "Read in.txt. Write out.txt: name, color, size as equals lines, then done."

TASK = """version = "1.0"

[metadata]
name = "{name}"
category = "quickstart"
difficulty = "easy"

[agent]
timeout_sec = {agent}

[verifier]
timeout_sec = 10.0
"""

DOCKERFILE = """FROM debian:bookworm-slim
WORKDIR /app
COPY in.txt /app/in.txt
"""

# Bash builtins alone: hundreds of verifications must cost next to nothing.
TEST = """#!/bin/bash
# Writes a reward in [0, 1]: a quarter for each line of out.txt that is right. No out.txt gives 0.
expected=("name={name}" "color={color}" "size={size}" "done")
lines=() passed=0
if [[ -f out.txt ]]; then
    mapfile -n 16 -t lines < out.txt
fi
for i in 0 1 2 3; do
    [[ "${{lines[i]-}}" == "${{expected[i]}}" ]] && ((passed++))
done
logs="${{VERIFIER_LOGS:-/logs/verifier}}"
[[ -d "$logs" ]] || mkdir -p "$logs"
rewards=(0.0 0.25 0.5 0.75 1.0)
echo "${{rewards[passed]}}" > "$logs/reward.txt"
"""

SOLUTION = """#!/bin/bash
IFS=, read -r name color size < in.txt
printf 'name=%s\\ncolor=%s\\nsize=%s\\ndone\\n' "$name" "$color" "$size" > out.txt
"""


def cards(seed, start, count):
    """`count` cards of the seed's order, from `start`."""
    if start < 0 or count < 1 or start + count > len(CARDS):
        raise SystemExit(f"make_tasks: there are {len(CARDS)} cards; start + count must stay within them")
    return random.Random(seed).sample(CARDS, len(CARDS))[start : start + count]


def write_task(folder, card, agent_seconds):
    """One task folder; `card` is (name, color, size)."""
    name, color, size = card
    for part in ("environment", "tests", "solution"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    (folder / "task.toml").write_text(TASK.format(name=folder.name, agent=float(agent_seconds)))
    (folder / "instruction.md").write_text(INSTRUCTION + "\n")
    (folder / "environment" / "in.txt").write_text(f"{name},{color},{size}\n")
    (folder / "environment" / "Dockerfile").write_text(DOCKERFILE)
    for path, text in (
        (folder / "tests" / "test.sh", TEST.format(name=name, color=color, size=size)),
        (folder / "solution" / "solve.sh", SOLUTION),
    ):
        path.write_text(text)
        path.chmod(0o755)


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Make the quickstart's tasks in Harbor's format.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--agent-seconds", type=float, default=300.0, help="harness time-out of a task")
    options = parser.parse_args(arguments)
    for index, card in enumerate(cards(options.seed, options.start, options.count), options.start):
        write_task(options.out / f"card-{index:04d}", card, options.agent_seconds)
    print(f"{options.count} tasks in {options.out}")


if __name__ == "__main__":
    main()
