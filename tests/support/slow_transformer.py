"""A slow float64 Transformer written from the papers: one sequence, head and query at a time."""

import math

import torch

BEFORE = ("pre", "dyt", "derf")


class SlowTransformer:
    """Read the weights of a `wellposed` model; so a padded batch must equal its rows by themselves.

    A side is "" for a model of one stack, and "encoder." or "decoder." for one of two.
    """

    def __init__(self, model):
        self.config = model.config
        weights = {name: value.detach() for name, value in model.state_dict().items()}
        self.weights = {name.removeprefix("model."): value for name, value in weights.items()}

    def linear(self, name, x):
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def norm(self, name, x):
        if f"{name}.shift" in self.weights:
            squashed = torch.special.erf(
                self.weights[f"{name}.alpha"] * x + self.weights[f"{name}.shift"]
            )
            return squashed * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]
        if f"{name}.alpha" in self.weights:
            steep = (2 * self.weights[f"{name}.alpha"] * x).exp()
            squashed = 1 - 2 / (steep + 1)  # tanh
            return squashed * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]
        centred = x - x.sum(-1, keepdim=True) / x.shape[-1]
        variance = centred.square().sum(-1, keepdim=True) / x.shape[-1]
        scaled = centred / (variance + 1e-5).sqrt() * self.weights[f"{name}.weight"]
        return scaled + self.weights.get(f"{name}.bias", 0.0)

    def embed(self, tokens, side=""):
        width = self.config.hidden_size
        shared = side == "decoder." and self.config.share_embeddings
        table = self.weights[f"{'encoder.' if shared else side}embeddings.token.weight"]
        rows = []
        for position, token in enumerate(tokens):
            if self.config.position == "learned":
                places = self.weights[f"{side}embeddings.position.weight"]
                code = places[position] * math.sqrt(width)
            else:
                angles = [position / 10000 ** (2 * (c // 2) / width) for c in range(width)]
                waves = [(math.sin, math.cos)[c % 2](angle) for c, angle in enumerate(angles)]
                code = torch.tensor(waves, dtype=torch.float64)
            rows.append(table[token] * math.sqrt(width) + code)
        return torch.stack(rows)

    def attend(self, path, x, memory, *, is_causal):
        heads = self.config.num_attention_heads
        dim = self.config.hidden_size // heads
        query = self.linear(f"{path}.q_proj", x)
        key, value = (self.linear(f"{path}.{name}_proj", memory) for name in "kv")
        joined = torch.zeros_like(x)
        for head in range(heads):
            columns = slice(head * dim, (head + 1) * dim)
            q, k, v = (part[:, columns] for part in (query, key, value))
            factor = 1 / math.sqrt(dim)
            size = 1.0
            if f"{path}.q_norm.weight" in self.weights:
                q = self.norm(f"{path}.q_norm", q)
                k = self.norm(f"{path}.k_norm", k)
            if f"{path}.log_tau" in self.weights:
                q, k, v = (m / (m.square().sum(-1, keepdim=True) + 0.01).sqrt() for m in (q, k, v))
                factor = self.weights[f"{path}.log_tau"][head].exp()
                size = self.weights[f"{path}.nu"][head]
            for i in range(len(x)):
                length = i + 1 if is_causal else len(memory)
                weights = (factor * (k[:length] @ q[i])).exp()
                joined[i, columns] = size * (weights / weights.sum()) @ v[:length]
        return self.linear(f"{path}.o_proj", joined)

    def feed(self, path, x):
        hidden = self.linear(f"{path}.up_proj", x)
        if self.config.activation == "relu":
            hidden = hidden * (hidden > 0)
        else:
            hidden = hidden * 0.5 * (1 + torch.special.erf(hidden / math.sqrt(2)))
        return self.linear(f"{path}.down_proj", hidden)

    def half(self, path, x, branch):
        joined = branch(self.norm(f"{path}_norm", x) if self.config.norm in BEFORE else x)
        total = x + self.weights.get(f"{path}_residual.scale", 1.0) * joined
        return self.norm(f"{path}_norm", total) if self.config.norm == "post" else total

    def hidden(self, tokens, *, is_causal, side="", memory=None):
        """Return the last hidden states of a stack, with cross-attention to `memory` if given."""
        x = self.embed(tokens, side)
        decoder = side == "decoder."
        count = self.config.num_decoder_layers if decoder else self.config.num_hidden_layers
        for layer in range(count):
            parts = ("attention", "cross_attention", "feedforward")
            itself, cross, feed = (f"{side}layers.{layer}.{part}" for part in parts)
            x = self.half(itself, x, lambda h, p=itself: self.attend(p, h, h, is_causal=is_causal))
            if memory is not None:
                x = self.half(
                    cross, x, lambda h, p=cross: self.attend(p, h, memory, is_causal=False)
                )
            x = self.half(feed, x, lambda h, p=feed: self.feed(p, h))
        return self.norm(f"{side}final_norm", x) if self.config.norm in BEFORE else x


def exact(model):
    """Return the model in float64, sines included, no norm, bias or scale as it starts."""
    model = model.double().eval()
    with torch.no_grad():
        for module in model.modules():
            if type(module).__name__ == "SinusoidalPositions":
                module.reset_parameters()
        for name, parameter in model.named_parameters():
            if not name.endswith(("_proj.weight", "token.weight")):
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def padded(rows, side, extra=0):
    """Return token ids and attention mask of rows of different lengths, padded on one side."""
    width = max(map(len, rows)) + extra
    ids = torch.full((len(rows), width), 7)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        span = slice(0, len(row)) if side == "right" else slice(width - len(row), width)
        ids[i, span], mask[i, span] = torch.tensor(row), 1
    return ids, mask
