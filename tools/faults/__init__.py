"""Faults looked for at size: kills, damage, full disks, two writers, clocks, hostile folders and
fuzzed input.

python -m tools.faults                          # every family, at the sizes of docs/reliability.md
python -m tools.faults damage fuzz --inputs 20000 --seed 7 --page /dev/null
"""
