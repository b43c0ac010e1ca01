"""Tasks: data, collation, loss and metric of one problem each; importing them imports no torch."""

from wellposed.tasks.data.splits import SPLITS as SPLITS
from wellposed.tasks.data.splits import Split as Split
from wellposed.tasks.image_classification import (
    ImageClassificationOptions as ImageClassificationOptions,
)
from wellposed.tasks.image_classification import ImageClassificationTask as ImageClassificationTask
from wellposed.tasks.language_modeling import CharLMOptions as CharLMOptions
from wellposed.tasks.language_modeling import CharLMTask as CharLMTask
from wellposed.tasks.language_modeling import LanguageModelingOptions as LanguageModelingOptions
from wellposed.tasks.language_modeling import LanguageModelingTask as LanguageModelingTask
from wellposed.tasks.language_modeling import WordLMOptions as WordLMOptions
from wellposed.tasks.language_modeling import WordLMTask as WordLMTask
from wellposed.tasks.task import TASKS as TASKS
from wellposed.tasks.task import Example as Example
from wellposed.tasks.task import Task as Task
from wellposed.tasks.task import TaskSpec as TaskSpec
from wellposed.tasks.task import build_task as build_task
from wellposed.tasks.text_classification import (
    TextClassificationOptions as TextClassificationOptions,
)
from wellposed.tasks.text_classification import TextClassificationTask as TextClassificationTask
from wellposed.tasks.translation import TranslationOptions as TranslationOptions
from wellposed.tasks.translation import TranslationTask as TranslationTask
