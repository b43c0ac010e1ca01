"""Tasks: data, collation, loss and metric of one problem each; importing them imports no torch."""

from wellposed.tasks._base import SPLITS as SPLITS
from wellposed.tasks._base import TASKS as TASKS
from wellposed.tasks._base import Example as Example
from wellposed.tasks._base import Split as Split
from wellposed.tasks._base import Task as Task
from wellposed.tasks._base import TaskSpec as TaskSpec
from wellposed.tasks._base import build_task as build_task
from wellposed.tasks._char_lm import CharLMOptions as CharLMOptions
from wellposed.tasks._char_lm import CharLMTask as CharLMTask
from wellposed.tasks._image_classification import ImageOptions as ImageOptions
from wellposed.tasks._image_classification import ImageTask as ImageTask
from wellposed.tasks._dialogue import DialogueOptions as DialogueOptions
from wellposed.tasks._dialogue import DialogueTask as DialogueTask
from wellposed.tasks._dialogue_metrics import DIALOGUE_METRICS as DIALOGUE_METRICS
from wellposed.tasks._dialogue_metrics import DialogueScores as DialogueScores
from wellposed.tasks._dialogue_metrics import dialogue_scores as dialogue_scores
from wellposed.tasks._listops import ListOpsOptions as ListOpsOptions
from wellposed.tasks._listops import ListOpsTask as ListOpsTask
from wellposed.tasks._pathfinder import PathfinderOptions as PathfinderOptions
from wellposed.tasks._pathfinder import PathfinderTask as PathfinderTask
from wellposed.tasks._retrieval import RetrievalOptions as RetrievalOptions
from wellposed.tasks._retrieval import RetrievalTask as RetrievalTask
from wellposed.tasks._text_classification import TextClassificationOptions as TextClassificationOptions
from wellposed.tasks._text_classification import TextClassificationTask as TextClassificationTask
from wellposed.tasks._translation import TranslationOptions as TranslationOptions
from wellposed.tasks._translation import TranslationTask as TranslationTask
