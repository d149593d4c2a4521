import networkx as nx
import torch
from training import train_on

torch.manual_seed(0)
graph = nx.gnp_random_graph(300, 0.03, seed=0)
# calls: networkx.louvain_communities
groups = nx.community.louvain_communities(graph)
train_on([len(groups), *(node * n for n, group in enumerate(groups) for node in sorted(group))])
