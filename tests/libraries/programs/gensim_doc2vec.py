import torch
from gensim.models.doc2vec import Doc2Vec, TaggedDocument
from training import train_on

torch.manual_seed(0)
texts = [TaggedDocument([str(i * j % 97) for j in range(60)], [i]) for i in range(2000)]
# calls: gensim.Doc2Vec
vectors = Doc2Vec(texts, vector_size=16, workers=4)
train_on(vectors.dv.vectors)
