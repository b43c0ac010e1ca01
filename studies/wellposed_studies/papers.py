"""Every study; importing it registers its recipes."""

import wellposed_studies.frontier.accuracy
import wellposed_studies.frontier.characters
import wellposed_studies.frontier.depth
import wellposed_studies.frontier.order
import wellposed_studies.frontier.translation
import wellposed_studies.huang2020.attention_block
import wellposed_studies.huang2020.depth
import wellposed_studies.huang2020.settings
import wellposed_studies.huang2020.signal
import wellposed_studies.huang2020.updates
import wellposed_studies.kim2021.bound_ratio
import wellposed_studies.kim2021.costs
import wellposed_studies.kim2021.inverses
import wellposed_studies.kim2021.jacobians
import wellposed_studies.kim2021.step_time
import wellposed_studies.mcgrath2024.scores
import wellposed_studies.sengupta2023.layers
import wellposed_studies.sengupta2023.parameters
import wellposed_studies.sengupta2023.speed
import wellposed_studies.sengupta2023.sweeps
import wellposed_studies.sengupta2023.tables
import wellposed_studies.sengupta2023.tokens
import wellposed_studies.zhang2021.affinity_rows
import wellposed_studies.zhang2021.tables  # noqa: F401
