"""Settings, and the statuses of every reason."""

import dataclasses

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from coordinator.api.statuses import CODES, to_status
from coordinator.settings import CoordinatorSettings, check_settings
from serving_core import reasons
from serving_core.errors import RequestError, SettingsError


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost"])
def test_loopback_needs_no_secret(host):
    check_settings(CoordinatorSettings(host=host, http_host=host, fleet_host=host))


@pytest.mark.parametrize(
    ("address", "secret"), [("host", "api_key"), ("http_host", "api_key"), ("fleet_host", "fleet_secret")]
)
def test_off_loopback_a_secret_is_needed(address, secret):
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org", ""):
        settings = CoordinatorSettings(**{address: host})
        with pytest.raises(SettingsError, match=f"SPLITSERVE_{secret.upper()}"):
            check_settings(settings)
        check_settings(dataclasses.replace(settings, **{secret: "s"}))


def test_a_node_may_miss_a_heartbeat():
    with pytest.raises(SettingsError, match="node_timeout_s \\(1\\) must be above heartbeat_s \\(1\\)"):
        check_settings(CoordinatorSettings(node_timeout_s=1.0, heartbeat_s=1.0))


@pytest.mark.parametrize("value", ["https://a.example/", "a.example", '["*"]', "https://A.example", "https://"])
def test_origins_are_written_as_browsers_send_them(value):
    with pytest.raises(SettingsError, match="allowed_origins must be"):
        check_settings(CoordinatorSettings(allowed_origins=f"http://localhost:3000, {value}"))


def test_classes_are_read_at_start():
    check_settings(CoordinatorSettings(slo_class=("chat=ttft:500,tpot:40", "tight=ttft:5x")))
    with pytest.raises(SettingsError, match="slo_class 'a' is given twice"):
        check_settings(CoordinatorSettings(slo_class=("a=ttft:1", "a=ttft:2")))


@pytest.mark.parametrize(
    "value", ["localhost:4317", "http://localhost", "grpc://a:1", "http://a:1/v1/traces", "https://u@a:1"]
)
def test_an_endpoint_for_traces_is_a_url_with_a_port(value):
    check_settings(CoordinatorSettings(otlp_endpoint="https://[::1]:4317"))
    with pytest.raises(SettingsError, match="otlp_endpoint must be http://HOST:PORT or https://HOST:PORT, not"):
        check_settings(CoordinatorSettings(otlp_endpoint=value))


@pytest.mark.parametrize(
    ("text", "problem"),
    [("{", "must be JSON: an object"), ("[]", "must be JSON: an object"), ('{"tools": []}', "has tools, which is")],
)
def test_variables_of_the_chat_template_are_read_at_start(text, problem):
    check_settings(CoordinatorSettings(chat_template_kwargs='{"enable_thinking": false}'))
    with pytest.raises(SettingsError, match=f"chat_template_kwargs {problem}"):
        check_settings(CoordinatorSettings(chat_template_kwargs=text))


def details_of(error):
    status = to_status(error)
    [(key, value)] = status.trailing_metadata
    assert key == "grpc-status-details-bin"
    rich = status_pb2.Status.FromString(value)
    assert (rich.code, rich.message) == (status.code.value[0], status.details)
    parts = {}
    for packed in rich.details:
        part = getattr(error_details_pb2, packed.TypeName().rpartition(".")[2])()
        packed.Unpack(part)
        parts[type(part).__name__] = part
    return status, parts


def test_every_public_reason_has_a_status():
    public = {value for name, value in vars(reasons).items() if name.isupper()} - {
        reasons.TRANSFER_FAILED,
        reasons.TRANSFER_ABORTED,
        reasons.NAME_TAKEN,
        reasons.TRANSFER_REVOKED,
        reasons.STEP_FAILED,
    }
    assert public == CODES.keys()
    for reason in public:
        status, parts = details_of(RequestError(reason, "text"))
        assert status.details == "text"
        assert parts["ErrorInfo"] == error_details_pb2.ErrorInfo(reason=reason, domain="splitserve")


def test_a_bad_field_and_progress_are_told():
    _, parts = details_of(RequestError("BAD_PARAM", "top_p is bad", field="top_p"))
    [violation] = parts["BadRequest"].field_violations
    assert (violation.field, violation.description) == ("top_p", "top_p is bad")
    assert "RetryInfo" not in parts
    status, parts = details_of(RequestError("WORKER_LOST", "gone", phase="decode", tokens_emitted="3"))
    assert status.code is grpc.StatusCode.UNAVAILABLE
    assert parts["ErrorInfo"].metadata == {"phase": "decode", "tokens_emitted": "3"}


@pytest.mark.parametrize(
    ("reason", "may_retry"),
    [
        ("QUEUE_FULL", True),
        ("NO_PREFILL_WORKER", True),
        ("DRAINING", True),
        ("SLOW_READER", False),
        ("BAD_PARAM", False),
    ],
)
def test_retry_is_suggested_where_it_can_help(reason, may_retry):
    _, parts = details_of(RequestError(reason, "text"))
    assert ("RetryInfo" in parts) == may_retry
