"""Data: from what a spec names to token arrays. Reads, checks, splits, tokenises; knows nothing of training.

The order is `gather` (files -> checked, split text), then `tokenise` (text -> arrays); `check_data` does both and gives all
faults at once. pandas-like conveniences are left out on purpose: every cell stays the text that it is.
"""

from ranksearch.data.check import Checked, check_data
from ranksearch.data.dataset import Dataset, load
from ranksearch.data.prepared import Prepared, Split
from ranksearch.data.tokenise import tokenise
from ranksearch.data.tokenizer import check_own_code, load_tokenizer

__all__ = ["Checked", "Dataset", "Prepared", "Split", "check_data", "check_own_code", "load", "load_tokenizer", "tokenise"]
