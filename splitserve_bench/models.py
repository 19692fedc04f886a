"""Which models benches take."""

from serving_core.model_config import read_model_config
from splitserve.launch.models import LocalModel, Report, resolve
from splitserve_bench.errors import BenchError


def writing_model(model: str, report: Report) -> LocalModel:
    """The model's folder, as `resolve` gives it. Raises BenchError for a model that makes embeddings."""
    local = resolve(model, report)
    if read_model_config(local.folder).embedder is not None:
        raise BenchError(f"{local.name} makes embeddings, and what is measured here is a model that writes answers")
    return local
