"""The text-level gRPC service on the same port, found by reflection: the same core, so the same answers as over HTTP."""

import time

import grpc
import pytest
from conftest import post
from google.protobuf import descriptor_pool, message_factory
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

SERVICE = "quire.inference.v1.Inference"
QUESTION = "What is the capital of France? Answer in one word."


class Client:
    def __init__(self, channel):
        self.channel = channel
        self.pool = descriptor_pool.DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
        self.service = self.pool.FindServiceByName(SERVICE)

    def call(self, method, timeout=60, **fields):
        m = self.service.FindMethodByName(method)
        request = message_factory.GetMessageClass(m.input_type)(**fields)
        answer = message_factory.GetMessageClass(m.output_type)
        make = self.channel.unary_stream if method.endswith("Stream") else self.channel.unary_unary
        return make(f"/{SERVICE}/{method}", request_serializer=lambda r: r.SerializeToString(), response_deserializer=answer.FromString)(
            request, timeout=timeout)


@pytest.fixture
def inference(server):
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        yield Client(channel)


def test_reflection_lists_the_service(inference):
    assert SERVICE in ProtoReflectionDescriptorDatabase(inference.channel).get_services()


def test_health(server):
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        # It follows /readyz within a fraction of a second.
        end = time.monotonic() + 2
        while stub.Check(health_pb2.HealthCheckRequest(), timeout=10).status != health_pb2.HealthCheckResponse.SERVING:
            assert time.monotonic() < end
            time.sleep(0.05)
        assert stub.Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=10).status == health_pb2.HealthCheckResponse.SERVING


def test_models(inference, model):
    listed = inference.call("Models").models
    assert model in [m.name for m in listed] and listed[0].vocab_size == 49152 and listed[0].max_context > 0


def test_chat_equals_http(inference, server, model):
    parameters = {"temperature": 0.0, "max_tokens": 16}
    over_http = post(server, "/v1/chat/completions", {"model": model, "messages": [{"role": "user", "content": QUESTION}], **parameters})[1]
    fields = dict(model=model, messages=[{"role": "user", "content": QUESTION}], parameters=parameters)
    answer = inference.call("Chat", **fields)
    assert answer.choices[0].text == over_http["choices"][0]["message"]["content"]
    assert answer.choices[0].finish_reason == over_http["choices"][0]["finish_reason"]
    assert answer.usage.completion_tokens == over_http["usage"]["completion_tokens"]
    events = list(inference.call("ChatStream", **fields))
    assert "".join(e.delta.text for e in events if e.WhichOneof("event") == "delta") == answer.choices[0].text
    assert [e.WhichOneof("event") for e in events[-2:]] == ["end", "usage"]


def test_complete_choices_and_logprobs(inference, model):
    answer = inference.call("Complete", model=model, text="The capital of France is",
                            parameters={"temperature": 1.0, "max_tokens": 6, "n": 3, "seed": 5, "logprobs": 2})
    assert [c.index for c in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        assert all(t.logprob <= 0 and len(t.top) == 2 for t in choice.logprobs)
    texts = {0: "", 1: "", 2: ""}
    for e in inference.call("CompleteStream", model=model, text="The capital of France is",
                            parameters={"temperature": 1.0, "max_tokens": 6, "n": 3, "seed": 5}):
        if e.WhichOneof("event") == "delta":
            texts[e.delta.index] += e.delta.text
    assert list(texts.values()) == [c.text for c in answer.choices]


def test_tokenize_and_back(inference, model):
    text = "Hello 🙂 world"
    tokens = inference.call("Tokenize", model=model, text=text, return_pieces=True)
    assert len(tokens.pieces) == len(tokens.ids) > 0
    assert inference.call("Detokenize", model=model, ids=list(tokens.ids)).text == text


@pytest.mark.parametrize(("fields", "code", "words"), [
    (dict(model="no-such-model", text="A"), grpc.StatusCode.NOT_FOUND, "no-such-model"),
    (dict(text="A", parameters={"temperature": 9.0}), grpc.StatusCode.INVALID_ARGUMENT, "temperature"),
    (dict(text=""), grpc.StatusCode.INVALID_ARGUMENT, "prompt"),
    (dict(ids={"ids": [999999]}), grpc.StatusCode.INVALID_ARGUMENT, "999999"),
])
def test_errors_have_codes_and_name_the_field(inference, model, fields, code, words):
    with pytest.raises(grpc.RpcError) as e:
        inference.call("Complete", **{"model": model, **fields})
    assert e.value.code() == code and words in e.value.details(), e.value.details()


def test_cancel_and_deadline_free_everything(inference, server, model):
    from test_resources import settles

    stream = inference.call("CompleteStream", model=model, text="Once upon a time", parameters={"max_tokens": 2000, "ignore_eos": True})
    next(iter(stream))
    stream.cancel()
    settles(server)
    with pytest.raises(grpc.RpcError) as e:
        list(inference.call("CompleteStream", timeout=0.5, model=model, text="Once", parameters={"max_tokens": 2000, "ignore_eos": True}))
    assert e.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    settles(server)
