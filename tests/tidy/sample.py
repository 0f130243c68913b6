"""Print a seeded sample of comments and of sentences of documents, for a person to read.

`python -m tests.tidy.sample --seed N` prints 60 of each. Count those that need a second reading.
"""

import argparse
import random

from .prose import Sentence, read

#: Shorter sentences are labels.
WORDS_MIN = 5


def sample(seed: int, count: int) -> tuple[list[Sentence], list[Sentence]]:
    """Draw sentences of comments and docstrings, and of documents. O(project)."""
    found = [sentence for sentence in read() if len(sentence.text.split()) >= WORDS_MIN]
    drawn = random.Random(seed)
    documents = [sentence for sentence in found if sentence.path.endswith(".md")]
    comments = [sentence for sentence in found if not sentence.path.endswith(".md")]
    return drawn.sample(comments, count), drawn.sample(documents, count)


def main() -> None:
    """Print the sample."""
    parser = argparse.ArgumentParser(prog="python -m tests.tidy.sample", description=__doc__)
    parser.add_argument("--seed", type=int, required=True, help="seed of the sample")
    parser.add_argument("--count", type=int, default=60, help="sentences of each kind (60)")
    given = parser.parse_args()
    for name, chosen in zip(
        ("comments", "documents"), sample(given.seed, given.count), strict=True
    ):
        print(f"# {name}")
        for at, sentence in enumerate(sorted(chosen, key=lambda s: (s.path, s.line)), 1):
            print(f"{at:3}. {sentence.path}:{sentence.line}: {sentence.text}")


if __name__ == "__main__":
    main()
