import networkx as nx
import torch
from training import train_on

torch.manual_seed(0)
# calls: networkx.spring_layout
places = nx.spring_layout(nx.path_graph(20))
train_on(list(places.values()))
