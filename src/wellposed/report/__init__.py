"""From run folders to tables and one offline page; importing this package does not import torch."""

from wellposed.report._aggregate import Comparison as Comparison
from wellposed.report._aggregate import Summary as Summary
from wellposed.report._aggregate import TaskComparison as TaskComparison
from wellposed.report._aggregate import VariantResult as VariantResult
from wellposed.report._aggregate import aggregate as aggregate
from wellposed.report._page import build_report as build_report
from wellposed.report._page import figure_images as figure_images
from wellposed.statistics import Failure as Failure
from wellposed.statistics import PairedComparison as PairedComparison
from wellposed.statistics import SeedResults as SeedResults
from wellposed.statistics import compare_seeds as compare_seeds
from wellposed.statistics import holm_correction as holm_correction
from wellposed.statistics import mean_and_standard_error as mean_and_standard_error
from wellposed.statistics import paired_comparison as paired_comparison
