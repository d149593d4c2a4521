import torch
from gensim.models import LdaModel
from training import train_on

torch.manual_seed(0)
corpus = [[(i * j % 17, 1) for j in range(5)] for i in range(50)]
# calls: gensim.LdaModel
topics = LdaModel(corpus, num_topics=3)
train_on(topics.get_topics())
