"""Who runs each command of the pages. The first line that a command matches from its beginning counts.

`Here`: test_commands.py runs it, word for word, in a folder of its own beside a cluster of two decode nodes. `By`: a
test, or a script of deploy/, does what it says. `Nobody`: it cannot be run here, and why. Whatever becomes of it, its
flags and what it names are checked (commands.py).
"""

import re
from dataclasses import dataclass
from typing import Final

from tests.docs.commands import Command


@dataclass(frozen=True)
class Here:
    """Run by test_commands.py."""


@dataclass(frozen=True)
class By:
    """Run by this test, FILE::NAME, or script."""

    where: str


@dataclass(frozen=True)
class Nobody:
    """Run by nobody, for this reason."""

    why: str


Fate = Here | By | Nobody

_UNIT: Final = "tests/unit/splitserve/"
_LAUNCHER: Final = _UNIT + "test_launcher.py::"
_SYSTEM: Final = "tests/system/"
_HTTP_TOOLS: Final = "tests/unit/coordinator/test_http_tools.py::"
_CLI: Final = _UNIT + "test_cli.py::"
_BENCH: Final = "tests/unit/splitserve_bench/"
_COMPOSE: Final = By("deploy/compose_demo/story.py")
_OTHERS: Final = Nobody("measured by hand beside a program of other people, which set-up does not bring")
_CLUSTER: Final = Nobody("needs a Kubernetes cluster; what it applies is checked by tests/unit/deploy")

SERVED: Final = "splitserve up --prefill 1 --decode 2"
"""The command whose cluster the others ask."""

FATES: Final[tuple[tuple[str, Fate], ...]] = (
    # The cluster, and who asks it.
    (rf"{SERVED}$", Here()),
    (r"splitserve generate (Why|TEXT|- <|What)", Here()),
    (r"echo .* \| splitserve generate -", Here()),
    (r"splitserve chat", Here()),
    (
        r"splitserve run-batch ",
        By(_SYSTEM + "test_run_batch.py::test_every_request_is_answered_though_most_are_turned_away_at_first"),
    ),
    (r"splitserve status( --json)?$", Here()),
    (r"splitserve status --json --watch", By(_CLI + "test_status_watch_shows_it_again_and_outlives_the_server")),
    (r"splitserve top --once", Here()),
    (r"splitserve top", By(_UNIT + "test_top.py::test_it_goes_on_until_a_key_and_leaves_the_terminal_as_it_was")),
    (
        r"splitserve drain --all",  # after it the cluster of the other commands takes no request
        By(_SYSTEM + "test_upgrade.py::test_a_fleet_that_drains_ends_its_requests_and_takes_no_more"),
    ),
    (r"splitserve (role|drain) ", Here()),
    (r"splitserve --version", Here()),
    (r"splitserve certs ", Here()),
    (r"curl http://localhost:8000/(metrics|ready|v1/chat/completions|inference/v1/generate)", Here()),
    (
        r"curl http://localhost:8000/v1/(un)?load_lora_adapter",
        By(_SYSTEM + "test_lora_loading.py::test_a_name_has_the_weights_that_were_loaded_last"),
    ),
    (
        r"curl http://localhost:9464/metrics",
        By(_SYSTEM + "test_dashboards.py::test_a_node_tells_of_its_own_steps_and_transfers"),
    ),
    (r"export ", Here()),
    # Other clusters.
    (r"splitserve demo", By(_LAUNCHER + "test_the_demo_answers_shows_the_timeline_and_leaves_nothing")),
    (r"splitserve up MODEL --config", By("tests/docs/test_commands.py::test_the_example_of_a_file_is_read")),
    (
        r"splitserve up (/path/to/model|--prefill 1 --decode 1( |$)|--dtype )",
        By(_LAUNCHER + "test_a_cluster_serves_and_survives_a_node_but_not_its_coordinator"),
    ),
    (r"splitserve up \S+\.gguf", By(_SYSTEM + "test_gguf.py::test_up_serves_a_file")),
    (
        r"splitserve up (Qwen/Qwen3-Emb|.* --runner)",
        By(_SYSTEM + "test_embeddings.py::test_embeddings_are_those_of_transformers"),
    ),
    (r"splitserve up MODEL --tool-call-parser", By(_HTTP_TOOLS + "test_calls_and_thoughts_of_a_family")),
    (r"splitserve up MODEL --lora", By(_SYSTEM + "test_lora.py::test_a_mixed_batch")),
    (r"splitserve generate \.\.\. --model", By(_SYSTEM + "test_lora.py::test_the_http_api_server")),
    (r"splitserve up (MODEL )?--mixed", By(_LAUNCHER + "test_a_cluster_of_nodes_that_do_both_serves")),
    (
        r"splitserve up MODEL --prefill 1 --mixed",
        By(_SYSTEM + "test_mixed.py::test_it_serves_with_a_prefill_node_and_without_it"),
    ),
    (r"splitserve up MODEL .*-pp ", By(_SYSTEM + "test_stages.py::test_answers_equal_transformers")),
    (r"splitserve up MODEL --prefill-tp", By(_SYSTEM + "test_tensor_parallel.py::test_answers_equal_transformers")),
    (r"splitserve up --slo-class", By(_SYSTEM + "test_limits.py::test_the_end_of_an_answer_tells_what_was_kept")),
    (
        r"splitserve up MODEL --otlp",
        By(_SYSTEM + "test_traces_and_logs.py::test_every_phase_of_a_request_is_in_its_trace"),
    ),
    (
        r"splitserve (prefill MODEL --engine vllm --kv-order|decode MODEL --dtype)",
        By(_SYSTEM + "test_vllm_mixed.py::test_answers_through_both_engines_are_those_of_transformers"),
    ),
    (
        r"(\.venv-vllm/bin/python -m )?splitserve (prefill|decode) MODEL --engine vllm",
        By(_SYSTEM + "test_vllm.py::test_answers_are_those_of_transformers"),
    ),
    (r"splitserve up MODEL --engine vllm", By(_SYSTEM + "test_vllm.py::test_up_starts_the_nodes_in_vllms_environment")),
    (r"make vllm", Nobody("installs vLLM, 600 MB, in an environment of its own")),
    (r"splitserve up MODEL --ray", By(_SYSTEM + "test_ray.py::up")),
    (r"ray start", Nobody("Ray's own command; tests/system/test_ray.py has a cluster of logical hosts")),
    (
        r"splitserve up MODEL --weights-memory-bytes",
        By("tests/unit/engine/test_offload.py::test_answers_are_those_of_the_model_in_memory"),
    ),
    (
        r"splitserve up MODEL --speculation draft",
        By(_SYSTEM + "test_speculation.py::test_a_draft_model_writes_ahead_of_answers_that_move_and_begin_again"),
    ),
    (
        r"splitserve up MODEL --speculation",
        By(_SYSTEM + "test_speculation.py::test_answers_that_move"),
    ),
    (
        r"splitserve up MODEL --kv-cache-dtype",
        By(_SYSTEM + "test_kv_cache_dtype.py::test_half_the_bytes_and_the_same_answers_for_any_ranks"),
    ),
    (
        r"splitserve up --kv-(host|disk)-bytes",
        By(_SYSTEM + "test_kv_tiers.py::test_a_chat_whose_beginning_was_evicted"),
    ),
    (r"torchrun ", By(_SYSTEM + "test_tensor_parallel.py::test_ranks_started_together_as_torchrun_does")),
    (
        r"splitserve (coordinator|prefill|decode|mixed) .*--tls",
        By(_SYSTEM + "test_tls.py::test_whole_answers_over_grpc_and_http"),
    ),
    (
        r"splitserve (api-server|coordinator .*--standby)",
        By(_SYSTEM + "test_standby.py::test_no_stream_notices_that_its_coordinator_is_gone"),
    ),
    (r"splitserve coordinator FILE", By(_LAUNCHER + "test_a_role_becomes_the_process_of_its_room")),
    (
        r"splitserve (coordinator|prefill|decode|mixed) ",
        By(_SYSTEM + "test_hosts.py::test_the_answers_are_those_of_one_machine"),
    ),
    (r"(splitserve generate|curl) .*ca\.crt", By(_SYSTEM + "test_tls.py::test_the_command_line_asks_over_tls")),
    (r"python -m splitserve\.launch\.models", By(_UNIT + "test_gguf_folder.py::test_a_file_is_a_model_by_its_name")),
    (r"grep -h", Nobody("of logs that whoever runs the fleet has collected")),
    # Measuring.
    (r"splitserve doctor .*--check-bits", By(_SYSTEM + "test_bits.py::test_doctor_shows_a_line_for_each_history")),
    (r"splitserve doctor --save", By(_BENCH + "test_doctor_save.py::test_the_command_saves_what_a_simulation_reads")),
    (r"splitserve doctor", By(_BENCH + "test_doctor.py::test_the_command_measures_a_model")),
    (r"splitserve simulate", By(_BENCH + "test_simulate.py::test_it_says_what_bench_serve_says")),
    (r"splitserve plan ", By(_BENCH + "test_plan_search.py::test_the_command_finds_a_plan_and_says_how_to_run_it")),
    (r"python -m splitserve_bench\.device", By(_BENCH + "test_device.py::test_every_step_can_be_done_in_tiny_sizes")),
    (r"splitserve bench engine .*--measure speculation", By(_BENCH + "test_speculation.py::test_the_command")),
    (r"splitserve bench engine", By(_BENCH + "test_engine.py::test_the_tables_show_every_figure")),
    (r"splitserve bench transfer", By(_BENCH + "test_transfer.py::test_the_command")),
    (r"splitserve bench compare", By(_SYSTEM + "test_bench_compare.py::test_each_contender_answers_the_same_requests")),
    (r"splitserve bench serve .*--stages", By(_BENCH + "test_serve_stages.py::test_a_server_is_loaded_in_stages")),
    (r"splitserve bench serve .*--plots", By(_BENCH + "test_serve_command.py::test_files_and_pictures")),
    (
        r"splitserve bench serve --dataset-name (sharegpt|custom)",
        By(_SYSTEM + "test_bench_serve.py::test_both_sides_count_the_tokens_of_texts_alike"),
    ),
    (r"splitserve bench serve", By(_SYSTEM + "test_bench_serve.py::test_the_nodes_count_the_same")),
    (r"(\S+=\S+ )*python peer_|vllm ", _OTHERS),
    (r"lm_eval ", By("tests/clients/test_clients.py::test_lm_eval")),
    # Set-up, containers, Kubernetes.
    (r"make demo", By(_LAUNCHER + "test_the_demo_answers_shows_the_timeline_and_leaves_nothing")),
    (r"make faults", By("tests/faults/test_matrix.py")),
    (r"make soak", By(_SYSTEM + "test_soak.py")),
    (r"python -m tools\.wheels", By("tests/unit/tools/test_wheels.py::test_what_the_machine_has_is_left_out")),
    (r"python -m splitserve up", By(_SYSTEM + "test_base_install.py::test_a_checkout_that_is_not_installed_serves")),
    (r"make (setup|-B setup)", By(_UNIT + "test_setup.py::test_torch_comes_from_the_index_that_has_it_without_cuda")),
    (
        r"make compose-demo",
        By("tests/unit/deploy/test_compose_demo.py::test_without_an_engine_it_says_so_in_a_sentence"),
    ),
    (r"pip (install|wheel) ", By(_UNIT + "test_packaging.py::test_the_wheel_installs_the_rooms_and_nothing_else")),
    (r"docker build ", By("deploy/compose_demo/image.py")),
    (r"docker (run|exec|compose) |for n in 1 2; do docker run ", _COMPOSE),
    (
        r"cd (deploy|certs)$|cp \.env\.example|\(umask|openssl rand",
        Nobody("a step of the host's, for the commands behind it"),
    ),
    (r"curl http://localhost:8000/v1/models -H", _COMPOSE),
    (r"helm template ", By("tests/unit/deploy/test_chart_objects.py::test_every_object_is_one_of_kubernetes")),
    (r"helm install ", _CLUSTER),
    (r"kubectl ", _CLUSTER),
)


def fate_of(command: Command) -> Fate | None:
    """None for one that nobody has thought of."""
    return next((fate for pattern, fate in FATES if re.match(pattern, command.plain)), None)
