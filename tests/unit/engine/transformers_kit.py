"""Changes to the folders of models that transformers computes."""

import json


def rewrite(folder, **fields):
    """Change fields of the folder's config.json; return the folder."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return folder
