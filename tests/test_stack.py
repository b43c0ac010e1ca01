"""What real libraries do that one would not guess: each verb is right in that very situation."""

import logging

import peft
import pytest
import torch
from tests.support.close import assert_close
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    ViTConfig,
    ViTModel,
)

import wellposed as wp
from wellposed.errors import ConfigError, RoleNotFoundError

ADAPTERS = {
    "lora": peft.LoraConfig(r=4, target_modules=["query"]),
    "dora": peft.LoraConfig(r=4, use_dora=True, target_modules=["query"]),
    "oft": peft.OFTConfig(oft_block_size=8, target_modules=["query"]),
    "oft exact": peft.OFTConfig(
        oft_block_size=8, use_cayley_neumann=False, target_modules=["query"]
    ),
    "boft": peft.BOFTConfig(boft_block_size=8, target_modules=["query"]),
    "hra": peft.HRAConfig(r=4, target_modules=["query"]),
    "hra, Gram-Schmidt": peft.HRAConfig(r=4, apply_GS=True, target_modules=["query"]),
    "psoft": peft.PsoftConfig(r=4, target_modules=["query"]),
    "road": peft.RoadConfig(group_size=32, target_modules=["query"]),
    "delora": peft.DeloraConfig(r=4, target_modules=["query"]),
    "ia3": peft.IA3Config(target_modules=["query"], feedforward_modules=[]),
    "vera": peft.VeraConfig(r=4, target_modules=["query"]),
    "lokr": peft.LoKrConfig(r=4, target_modules=["query"]),
    "loha": peft.LoHaConfig(r=4, target_modules=["query"]),
    "fourierft": peft.FourierFTConfig(n_frequency=10, target_modules=["query"]),
    "miss": peft.MissConfig(r=4, target_modules=["query"]),
}


def bert():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    return BertModel(BertConfig(num_hidden_layers=1, vocab_size=20, **sizes))


@pytest.mark.filterwarnings("ignore")  # of peft
@pytest.mark.parametrize("name", ADAPTERS)
def test_measure_reads_the_matrix_that_an_adapted_layer_computes(name):
    """Adapters named after rotations may scale, and approximate ones are far from orthogonal."""
    model = peft.get_peft_model(bert(), ADAPTERS[name])
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.3)
    query = model.base_model.model.encoder.layer[0].attention.self.query
    with torch.no_grad():
        computed = (query(torch.eye(32)) - query(torch.zeros(1, 32))).T.double()
    rows = wp.measure(model, torch.arange(5)[None]).rows
    (row,) = [row for row in rows if row["role"] == "query"]
    assert row["sigma_max"] == pytest.approx(float(torch.linalg.matrix_norm(computed, 2)), rel=1e-4)
    gram = computed @ computed.T
    off = float((gram - torch.diag(gram.diagonal())).abs().max())
    assert row["orthogonality_error"] == pytest.approx(off, rel=1e-3, abs=1e-6)


def test_ties_are_read_from_tensors_and_not_from_the_configuration():
    sizes = {"d_model": 16, "d_kv": 8, "num_heads": 2, "d_ff": 32, "num_layers": 1}
    config = T5Config(vocab_size=20, tie_word_embeddings=False, **sizes)
    model = T5ForConditionalGeneration(config)
    assert model.lm_head.weight is model.shared.weight
    optimizer = torch.optim.SGD(model.parameters())
    handle = wp.constrain_(model, optimizer, where=["shared", "lm_head"], to="columns")
    (row,) = handle.report.rows
    assert "lm_head.weight" in (row.path, *row.also)


def test_patterns_speak_of_names_in_memory():
    """Files of ViT keep the names of older releases; an old name leads to the new one."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "image_size": 8, "patch_size": 4}
    model = ViTModel(ViTConfig(num_hidden_layers=1, num_attention_heads=2, **sizes))
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(RoleNotFoundError, match=r"layers\.0\.attention\.q_proj"):
        wp.constrain_(model, optimizer, where="*attention.attention.query.weight")
    handle = wp.constrain_(model, optimizer, where="*attention.q_proj.weight")
    assert handle.paths == ("layers.0.attention.q_proj.weight",)


def test_an_optimizer_that_is_older_than_a_parametrisation_is_named():
    model = nn.TransformerEncoderLayer(8, 2, 16)
    optimizer = torch.optim.AdamW(model.parameters())
    nn.utils.parametrizations.orthogonal(model.linear1)
    with pytest.raises(ConfigError, match="linear1"):
        wp.constrain_(model, optimizer, where="linear1", to="spectral")


class Attention(nn.Module):
    """Two heads of width 8, with options of the kernel."""

    def __init__(self, **options):
        super().__init__()
        for name in ("query", "key", "value", "output"):
            self.register_module(name, nn.Linear(16, 16))
        self.options = options

    def heads(self, x):
        layers = (self.query, self.key, self.value)
        return [layer(x).unflatten(-1, (2, 8)).transpose(1, 2) for layer in layers]

    def forward(self, x):
        mixed = nn.functional.scaled_dot_product_attention(*self.heads(x), **self.options)
        return self.output(mixed.transpose(1, 2).flatten(2))


def test_a_query_of_nan_is_noticed_although_the_kernel_returns_zeros(caplog):
    torch.manual_seed(0)
    model = Attention()
    x = torch.randn(1, 3, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = wp.Monitor(model, optimizer, every=1, batch=x)
    with torch.no_grad():
        model.query.weight[0, 0] = float("nan")
    output = model(x)
    assert output.isfinite().all()  # the kernel hides it
    output.sum().backward()
    optimizer.step()
    with caplog.at_level(logging.WARNING), pytest.raises(wp.ConvergenceError, match="query"):
        monitor.step()
    assert "query: the first module whose output held NaN" in caplog.text
    monitor.remove()


def test_a_mask_beside_is_causal_counts_as_both():
    torch.manual_seed(0)
    mask = torch.zeros(5, 5)
    mask[:, 0] = -float("inf")
    model = Attention(attn_mask=mask, is_causal=True).double()
    model.options["attn_mask"] = mask.double()
    x = torch.randn(1, 5, 16).double()
    penalty = wp.OrthogonalityPenalty(model, affinity=1.0, batch=x)
    output = model(x)
    value = penalty()

    query, key, values = model.heads(x)
    logits = (query @ key.transpose(-1, -2)) / 8**0.5 + mask
    logits = logits.masked_fill(~torch.ones(5, 5).tril().bool(), -float("inf"))
    weights = logits.softmax(-1).nan_to_num()  # the first query sees no key
    mixed = (weights @ values).transpose(1, 2).flatten(2)
    assert_close(model.output(mixed), output)
    visible = weights[..., 1:]  # no query may see the first key
    expected = (visible.mT @ visible - torch.eye(4)).square().sum()
    assert_close(value, expected, rtol=1e-9, atol=0)
    penalty.remove()


@pytest.mark.filterwarnings("ignore")  # of transformers, at missing weights
def test_a_bfloat16_file_is_loaded_in_bfloat16_and_its_lost_steps_are_named(tmp_path, caplog):
    """As many entries move as from a float32 copy, only if the copy is loaded."""
    bert().bfloat16().save_pretrained(tmp_path)
    shares = {}
    for dtype in ("auto", torch.float32):
        model = BertModel.from_pretrained(tmp_path, dtype=dtype)
        weight = model.encoder.layer[0].output.dense.weight
        before = weight.detach().clone()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5)
        with caplog.at_level(logging.WARNING):
            handle = wp.constrain_(model, optimizer, where="query", to="spectral", bound=9.0)
        for _ in range(10):
            model(torch.arange(5)[None]).last_hidden_state.square().mean().backward()
            optimizer.step()
        handle.remove()
        shares[weight.dtype] = float((weight != before).float().mean())
    assert shares[torch.bfloat16] < 0.5
    assert shares[torch.float32] > 0.99
    lines = [record.message for record in caplog.records if "rounded away" in record.message]
    assert len(lines) == 1
    assert "trained weights are bfloat16: steps below 1/512 of an entry" in lines[0]


def first_gradient(folder, count, **scale):
    """Return the gradient of a key weight in a step of 8 rows in ``count`` micro-batches."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(num_hidden_layers=1, vocab_size=20, num_labels=3, **sizes, **dropout)
    model = BertForSequenceClassification(config).double()
    gradients = []

    class Kept(TrainerCallback):
        def on_pre_optimizer_step(self, *_, **__):
            key = model.bert.encoder.layer[0].attention.self.key.weight
            gradients.append(key.grad.clone())

    options = {"max_steps": 1, "report_to": "none", "use_cpu": True, "save_strategy": "no"}
    options |= {"per_device_train_batch_size": 8 // count, "gradient_accumulation_steps": count}
    options |= {"max_grad_norm": 0.0, "disable_tqdm": True}
    rows = [{"input_ids": [5 + row, 6, 7, 8 + row], "labels": row % 3} for row in range(8)]
    arguments = TrainingArguments(str(folder), **options)
    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[Kept()])
    if scale:
        wp.OrthogonalityPenalty(model, key=0.3).attach(trainer, **scale)
    trainer.train()
    return gradients[0]


@pytest.mark.slow
def test_accumulated_losses_of_classifiers_are_counted_once_for_each_micro_batch(tmp_path, caplog):
    one, many = (first_gradient(tmp_path, count) for count in (1, 4))
    assert_close(many, 4 * one, rtol=1e-9, atol=1e-12)
    both, step, task = (
        first_gradient(tmp_path, count, scale=scale)
        for count, scale in ((1, "step"), (4, "step"), (4, "task"))
    )
    assert_close(step - many, both - one, rtol=1e-9, atol=1e-12)
    assert_close(task, 4 * both, rtol=1e-9, atol=1e-12)
    lines = [row.message for row in caplog.records if "relative strength" in row.message]
    assert len(lines) == 1  # of scale="step" with 4 micro-batches
    assert "relative strength is 1/4" in lines[0]


@pytest.mark.filterwarnings("ignore")  # of peft
def test_the_head_beside_lora_on_a_bfloat16_base_is_named(caplog):
    """PEFT makes adapters in float32, but copies ``modules_to_save`` in the dtype of the base."""
    config = BertConfig(
        num_hidden_layers=1,
        vocab_size=20,
        hidden_size=32,
        num_attention_heads=2,
        intermediate_size=64,
    )
    base = BertForSequenceClassification(config).bfloat16()
    lora = peft.LoraConfig(r=4, target_modules=["query"], task_type="SEQ_CLS")
    model = peft.get_peft_model(base, lora)
    trained = {n: p.dtype for n, p in model.named_parameters() if p.requires_grad}
    adapters = {dtype for name, dtype in trained.items() if "lora" in name}
    head = {dtype for name, dtype in trained.items() if "lora" not in name}
    assert (adapters, head) == ({torch.float32}, {torch.bfloat16})
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights)
    with caplog.at_level(logging.WARNING):
        wp.constrain_(model, optimizer, where="*.lora_A.*", to="spectral")
    (line,) = [record.message for record in caplog.records if "rounded away" in record.message]
    assert "2 trained weights are bfloat16" in line
