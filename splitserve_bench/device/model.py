"""`python -m splitserve_bench.device.model SHAPE LAYERS FOLDER`: writes a model of random weights there, with a
tokenizer in which each token is a word, so that a cluster can serve it. One that is there is left as it is."""

import json
import sys
import time
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from splitserve_bench.engine.random_models import Shape, shape_of, write_random_model

COMPLETE: Final = "complete"  # a file that is written last


def write_model(folder: Path, shape: Shape) -> None:
    """Raises OSError when there is no room for it."""
    if (folder / COMPLETE).exists():
        return
    write_random_model(folder, shape)
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(shape.vocab_size)}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    words.save(str(folder / "tokenizer.json"))
    (folder / COMPLETE).touch()


def main() -> None:
    name, layers, folder = sys.argv[1:]
    started_at = time.monotonic()
    write_model(Path(folder), shape_of(name, int(layers)))
    print(json.dumps({"seconds": time.monotonic() - started_at}))


if __name__ == "__main__":
    main()
