import tokenizers
import torch
from training import train_on
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

torch.manual_seed(0)
words = {"[PAD]": 0, "[MASK]": 1, **{str(n): n for n in range(2, 300)}}
model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[PAD]"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, pad_token="[PAD]", mask_token="[MASK]")
collate = DataCollatorForLanguageModeling(tokenizer, return_tensors="np")
# calls: transformers.DataCollatorForLanguageModeling.__call__
batch = collate([{"input_ids": list(range(2, 200))}])
train_on(batch["input_ids"])
