import igraph
import torch
from training import train_on

torch.manual_seed(0)
# calls: igraph.Graph.Erdos_Renyi
graph = igraph.Graph.Erdos_Renyi(30, 0.2)
train_on(graph.get_edgelist())
