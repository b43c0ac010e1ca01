"""What Kim et al. (2021) print in Tables 2 and 3: test NLL by attention and number of layers, D =
512."""

from __future__ import annotations

from collections.abc import Mapping

TABLE_2: Mapping[str, Mapping[int, float]] = {
    "dot_product": {1: 1.164, 2: 0.989, 3: 0.954, 4: 0.943, 5: 0.940},
    "l2": {1: 1.134, 2: 0.987, 3: 0.958, 4: 0.942, 5: 0.946},
    "l2_tied": {1: 1.237, 2: 1.055, 3: 1.001, 4: 0.994, 5: 1.023},
    "l2_contractive_kim2021": {
        1: 1.558, 2: 1.453, 3: 1.343, 4: 1.191, 5: 1.205, 6: 1.119, 8: 1.086, 10: 1.0495, 12: 1.015, 14: 1.005,
    },
}  # fmt: skip
TABLE_3: Mapping[str, Mapping[int, float]] = {
    "dot_product": {2: 1.061, 4: 1.032, 6: 1.021, 8: 1.017, 10: 1.025},
    "l2_tied": {2: 1.168, 4: 1.040, 6: 1.023, 8: 1.024, 10: 1.019, 12: 1.008, 14: 1.018, 16: 1.027, 18: 1.034},
    "l2_contractive_kim2021": {
        2: 1.246, 4: 1.135, 6: 1.103, 8: 1.079, 10: 1.072, 12: 1.060, 14: 1.039, 16: 1.029, 18: 1.031,
    },
}  # fmt: skip
