import pytest
import torch
import torch.distributed as dist
from tiny_models import FAMILIES, sharded, tiny_config, tiny_model
from torch.distributed.device_mesh import init_device_mesh
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from fedshard.engine.data import MicroBatch
from fedshard.engine.initial import fill, materialise
from fedshard.engine.loss import BY_MASK, BY_POSITIONS, check_isolation, document_mask, micro_loss

SEQUENCE, FIRST = 24, 11  # tokens in a sequence, of which the first document has so many


def micro(ids, *, isolated=False):
    """Two documents in each row; the last position has no target."""
    labels = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], dim=1)
    documents = (torch.arange(SEQUENCE) >= FIRST).long().expand_as(ids)
    positions = torch.arange(SEQUENCE).where(torch.arange(SEQUENCE) < FIRST, torch.arange(SEQUENCE) - FIRST)
    return MicroBatch(
        ids,
        labels,
        documents if isolated else None,
        positions.expand_as(ids) if isolated else None,
        int((labels != -100).sum()),
    )


def tokens(seed=0, rows=2):
    return torch.randint(3, 61, (rows, SEQUENCE), generator=torch.Generator().manual_seed(seed))


def logits(model, batch):
    """What the loss is taken from."""
    seen = []
    handle = model.register_forward_hook(lambda module, inputs, output: seen.append(output.logits.detach()))
    micro_loss(model, batch)
    handle.remove()
    return seen[0]


def test_a_sum_over_labels_by_hand():
    """Cross-entropy in plain arithmetic; positions without a target count nothing."""
    model, batch = tiny_model("llama"), micro(tokens())
    batch.labels[0, 3:9] = -100
    probabilities = logits(model, batch).double().softmax(-1)
    expected = sum(
        -probabilities[row, place, batch.labels[row, place]].log()
        for row in range(2)
        for place in range(SEQUENCE)
        if batch.labels[row, place] != -100
    )
    loss = micro_loss(model, batch)
    assert loss.nll_sum.item() == pytest.approx(float(expected), rel=1e-6)
    assert loss.router_loss is None


def test_sums_of_micro_batches_are_the_sum_of_the_batch():
    """With different numbers of labels in each, where a mean of means would be wrong; gradients too."""
    model, ids = tiny_model("llama"), tokens(rows=4)
    whole = micro(ids)
    whole.labels[0, 4:] = -100
    loss = micro_loss(model, whole).nll_sum
    loss.backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    total = 0.0
    for row in range(4):
        part = MicroBatch(ids[row : row + 1], whole.labels[row : row + 1], None, None, 0)
        each = micro_loss(model, part).nll_sum
        each.backward()
        total += each.item()
    assert total == pytest.approx(loss.item(), rel=1e-6)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-5)


def test_float32_whatever_the_model_computes_in():
    model = tiny_model("llama").to(torch.bfloat16)
    assert logits(model, micro(tokens())).dtype == torch.bfloat16
    assert micro_loss(model, micro(tokens())).nll_sum.dtype == torch.float32


def balance(router_logits, experts, used):
    """Switch Transformer's load-balancing loss over all layers' tokens. Source: arXiv:2101.03961, eq. 4 to 6."""
    probabilities = torch.cat(router_logits).softmax(-1)
    chosen = probabilities.topk(used, dim=-1).indices
    fraction = torch.stack([(chosen == expert).sum() / len(probabilities) for expert in range(experts)])
    return experts * (fraction * probabilities.mean(0)).sum()


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe"])
@pytest.mark.parametrize("isolated", [False, True])
def test_router_loss(family, isolated):
    """The architecture's own, with its config's coefficient, and with gradients that reach the routers."""
    model, batch = tiny_model(family), micro(tokens(), isolated=isolated)
    model.config.router_aux_loss_coef = 0.25
    seen = []
    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(lambda module, inputs, output: seen.append(output[0].detach()))
    loss = micro_loss(model, batch)
    assert loss.router_loss is not None
    assert loss.router_loss.item() == pytest.approx(0.25 * balance(seen, 4, 2).item(), rel=1e-5)
    loss.router_loss.backward()
    assert model.get_parameter("model.layers.0.mlp.gate.weight").grad.abs().sum() > 0


def test_no_router_loss_where_its_coefficient_is_zero():
    model = tiny_model("mixtral")
    model.config.router_aux_loss_coef = 0.0
    assert micro_loss(model, micro(tokens())).router_loss is None


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_isolated_documents_do_not_see_one_another(family, attention):
    """Another first document changes the second one's logits by exactly 0; without isolation it does change them."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family), attn_implementation=attention).eval()
    one, other = tokens(), tokens()
    other[:, :FIRST] = tokens(seed=1)[:, :FIRST]
    with torch.no_grad():
        second = [logits(model, micro(ids, isolated=True))[:, FIRST:] for ids in (one, other)]
        seeing = [logits(model, micro(ids))[:, FIRST:] for ids in (one, other)]
        alone = model(input_ids=one[:, FIRST:], use_cache=False).logits
    assert torch.equal(*second)
    assert (seeing[0] - seeing[1]).abs().max() > 1e-3
    torch.testing.assert_close(second[0], alone, rtol=0, atol=1e-6)


def test_every_isolating_architecture_is_tested():
    assert {model_type for model_type, _ in FAMILIES.values()} == BY_POSITIONS | BY_MASK


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_isolated_in_bfloat16(family):
    """A mask of another type than the queries is refused by torch."""
    model = tiny_model(family).to(torch.bfloat16)
    assert micro_loss(model, micro(tokens(), isolated=True)).nll_sum.isfinite()


def test_other_architectures_are_refused():
    assert check_isolation(tiny_config("llama")) is None
    fault = check_isolation(CONFIG_MAPPING["bloom"]())
    assert fault is not None
    assert fault.key == "data.isolate_documents"
    assert "bloom" in fault.says
    assert "mixtral" in fault.mend


def test_mask_of_documents_of_one_token():
    mask = document_mask(torch.tensor([[0, 1, 1, 2]]), torch.float32)
    seen = (mask == 0).int().tolist()
    assert seen == [[[[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1]]]]


# OPT's block returns a view of its output; nothing after it writes there, which is what FSDP2 warns of.
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .FSDPOPTDecoderLayer. returned a view")
@pytest.mark.parametrize("family", ["llama-tied", "opt", "mixtral"])
def test_under_fsdp(family):
    """The same loss and gradients as the plain model, with documents isolated."""
    config, batch = tiny_config(family), micro(tokens(), isolated=True)
    plain = AutoModelForCausalLM.from_config(config).eval()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = sharded(config, init_device_mesh("cpu", (1,), mesh_dim_names=("shard",)))
        materialise(model, torch.device("cpu"))
        fill(model, 0)
        model.eval()
        with torch.no_grad():
            for name, parameter in plain.named_parameters():
                parameter.copy_(model.get_parameter(name).full_tensor())
        ours, theirs = micro_loss(model, batch), micro_loss(plain, batch)
        assert ours.nll_sum.item() == theirs.nll_sum.item()
        ours.nll_sum.backward()
        theirs.nll_sum.backward()
        for name, parameter in plain.named_parameters():
            assert torch.equal(model.get_parameter(name).grad.full_tensor(), parameter.grad), name
    finally:
        dist.destroy_process_group()
