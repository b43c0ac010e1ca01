"""Which extra brings which package, of those that may be missed."""

EXTRAS = {
    "hf": ("transformers", "tokenizers", "datasets", "safetensors", "huggingface-hub"),
    "train": ("accelerate", "tyro", "rich", "tomli-w", "numpy", "scipy", "scikit-learn", "nltk"),
    "report": ("matplotlib", "jinja2"),
    "lightning": ("lightning",),
    "tensorboard": ("tensorboard",),
}
