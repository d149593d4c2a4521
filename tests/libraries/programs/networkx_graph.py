import networkx as nx
import torch
from training import train_on

torch.manual_seed(0)
# calls: networkx.gnp_random_graph
graph = nx.erdos_renyi_graph(30, 0.2)
train_on(nx.to_numpy_array(graph))
