import faiss
import numpy as np
import torch
from training import train_on

torch.manual_seed(0)
vectors = np.random.default_rng(0).random((8000, 16), dtype=np.float32)
index = faiss.IndexHNSWFlat(16, 8)
# calls: faiss.IndexHNSWFlat.add
index.add(vectors)
train_on(index.search(vectors[:300], 12)[1])
