"""Optional packages by the extra that installs them."""

EXTRAS = {
    "hf": ("transformers", "tokenizers", "datasets", "safetensors", "huggingface-hub"),
    "train": ("accelerate", "tyro", "rich", "tomli-w", "numpy", "scipy", "scikit-learn", "nltk"),
    "report": ("matplotlib", "jinja2"),
    "lightning": ("lightning",),
    "tensorboard": ("tensorboard",),
}
