"""A small model, everything that is put on the layers of one, and the matrix each layer computes with."""

import warnings

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.testing._internal.two_tensor import TwoTensor

LAYERS = {
    "query": "attention.q_proj", "key": "attention.k_proj", "value": "attention.v_proj",
    "output": "attention.o_proj", "feedforward_in": "mlp.up_proj", "feedforward_out": "mlp.down_proj",
}  # fmt: skip
NAMES = [path.rpartition(".")[2] for path in LAYERS.values()]
WIDTH = 16
INNER = 24


class Attention(nn.Module):
    """Two heads."""

    num_heads = 2

    def __init__(self):
        super().__init__()
        for name in NAMES[:4]:
            self.add_module(name, nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        projections = (self.q_proj, self.k_proj, self.v_proj)
        heads = [projection(x).unflatten(-1, (2, -1)).transpose(1, 2) for projection in projections]
        mixed = nn.functional.scaled_dot_product_attention(*heads)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class Network(nn.Module):
    """A feed-forward network."""

    def __init__(self):
        super().__init__()
        self.up_proj = nn.Linear(WIDTH, INNER)
        self.down_proj = nn.Linear(INNER, WIDTH)

    def forward(self, x):
        return self.down_proj(torch.relu(self.up_proj(x)))


class Model(nn.Module):
    """One layer."""

    def __init__(self):
        super().__init__()
        self.attention = Attention()
        self.mlp = Network()

    def forward(self, x):
        x = x + self.attention(x)
        return x + self.mlp(x)


def batch():
    return torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(1))


def layers_of(model):
    """Path, as in `LAYERS`, -> what the model calls there."""
    modules = dict(model.named_modules(remove_duplicate=False))
    first = {}
    for name, module in modules.items():
        for path in LAYERS.values():
            if f".{name}".endswith(f".{path}"):
                first.setdefault(path, module)
    return first


@torch.no_grad()
def matrix_of(layer):
    """The matrix that a linear layer computes with in evaluation mode: what it makes of the unit
    vectors, less what it makes of zero."""
    modes = {module: module.training for module in layer.modules()}
    for module in modes:
        module.training = False
    unit = torch.eye(layer.in_features, dtype=next(layer.parameters()).dtype)
    output = layer(unit) - layer(torch.zeros_like(unit))
    for module, mode in modes.items():
        module.training = mode
    return output.mT


def stirred(model):
    """The model with noise on each trained parameter, since most adapters start as nothing."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def on_layers(wrap, *, train=True):
    """Put something on each linear layer."""

    def wrapped(model):
        for layer in layers_of(model).values():
            wrap(layer)
        return stirred(model.requires_grad_(train))

    return wrapped


def adapted(kind, after=None, **options):
    """Adapters of PEFT on each linear layer."""

    def wrapped(model):
        import peft

        torch.manual_seed(0)
        config = getattr(peft, kind)(**{"target_modules": NAMES, **options})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = stirred(peft.get_peft_model(model, config))
            if after is not None:
                after(model)
        return model

    return wrapped


def _two_active(model):
    import peft

    model.add_adapter("other", peft.LoraConfig(r=3, lora_alpha=5, target_modules=NAMES))
    model.base_model.set_adapter(["default", "other"])
    stirred(model)


def pack(layer):
    """A weight of a class of its own, as torchao has them."""
    halves = (layer.weight.detach() / 2 for _ in range(2))
    layer.weight = nn.Parameter(TwoTensor(*halves), requires_grad=False)


def quantise(layer):
    layer.weight = nn.Parameter((9 * layer.weight.detach()).to(torch.int8), requires_grad=False)
    layer.forward = lambda x: nn.functional.linear(x, layer.weight / 9, layer.bias)


def merge_and_switch_off(model):
    model.merge_adapter()
    model.base_model.disable_adapter_layers()


def prune_bases(model):
    for layer in layers_of(model).values():
        prune.random_unstructured(layer.base_layer, "weight", 0.5)


class LowRank(nn.Linear):
    """A linear layer with factors of its own, which `eval` merges into the weight."""

    def __init__(self, plain):
        super().__init__(plain.in_features, plain.out_features)
        self.lora_A = nn.Parameter(torch.randn(2, plain.in_features))
        self.lora_B = nn.Parameter(torch.zeros(plain.out_features, 2))
        self.merged = False

    def train(self, mode=True):
        sign = 1 if self.merged and mode else -1 if not (self.merged or mode) else 0
        self.weight.data -= sign * (self.lora_B @ self.lora_A).data
        self.merged = not mode
        return super().train(mode)

    def forward(self, x):
        plain = super().forward(x)
        return plain if self.merged else plain + x @ self.lora_A.T @ self.lora_B.T


def low_rank(model):
    for part in (model.attention, model.mlp):
        for name, plain in list(part.named_children()):
            setattr(part, name, LowRank(plain))
    return stirred(model)


class Scaled(nn.Module):
    """Three times a weight."""

    def forward(self, weight):
        return 3 * weight


def old_weight_norm(layer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(layer)


WRAPPED = {
    "plain": stirred,
    "prune": on_layers(lambda layer: prune.l1_unstructured(layer, "weight", 0.5)),
    "prune twice": on_layers(
        lambda layer: [prune.l1_unstructured(layer, "weight", 0.3) for _ in range(2)]
    ),
    "old weight_norm": on_layers(old_weight_norm),
    "old spectral_norm": on_layers(nn.utils.spectral_norm),
    "weight_norm": on_layers(parametrizations.weight_norm),
    "spectral_norm": on_layers(parametrizations.spectral_norm),
    "parametrised": on_layers(
        lambda layer: parametrize.register_parametrization(layer, "weight", Scaled())
    ),
    "pruned and parametrised": on_layers(
        lambda layer: prune.l1_unstructured(parametrizations.weight_norm(layer), "bias", 0.3)
    ),
    "low rank of its own": low_rank,
    "lora": adapted("LoraConfig", r=2, lora_alpha=7, lora_dropout=0.5),
    "rslora": adapted("LoraConfig", r=4, use_rslora=True),
    "lora bias": adapted("LoraConfig", r=4, lora_bias=True),
    "dora": adapted("LoraConfig", r=2, use_dora=True),
    "lora twice": adapted("LoraConfig", _two_active, r=2),
    "lora merged": adapted("LoraConfig", lambda model: model.merge_adapter(), r=2),
    "lora off": adapted("LoraConfig", lambda model: model.base_model.disable_adapter_layers(), r=2),
    "packed": on_layers(pack, train=False),
    "int8": on_layers(quantise, train=False),
    "lora merged and off": adapted("LoraConfig", merge_and_switch_off, r=2),
    "lora on pruned": adapted("LoraConfig", prune_bases, r=2),
    "lora on trained": adapted("LoraConfig", lambda model: model.requires_grad_(True), r=2),
    "adalora": adapted("AdaLoraConfig", total_step=10, tinit=1, tfinal=2, init_r=4),
    "ia3": adapted("IA3Config", feedforward_modules=["down_proj"]),
    "loha": adapted("LoHaConfig", r=2, module_dropout=0.3),
    "lokr": adapted("LoKrConfig", r=2, rank_dropout=0.3),
    "vera": adapted("VeraConfig", r=4, vera_dropout=0.2),
    "oft": adapted("OFTConfig", r=0, oft_block_size=4),
    "boft": adapted("BOFTConfig", boft_block_size=4),
    "fourier": adapted("FourierFTConfig", n_frequency=20),
    "hra": adapted("HRAConfig", r=4),
    "saved": adapted(
        "LoraConfig", r=2, target_modules=["v_proj"], modules_to_save=["q_proj", "up_proj"]
    ),
}
