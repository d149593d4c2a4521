import torch
from gensim.models import Word2Vec
from training import train_on

torch.manual_seed(0)
sentences = [[str(i * j % 97) for j in range(60)] for i in range(2000)]
# calls: gensim.Word2Vec
vectors = Word2Vec(sentences, vector_size=16, workers=4)
train_on(vectors.wv.vectors)
