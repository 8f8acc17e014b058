"""A number for a graph: nodes and edges end to end (`flat`); an edge counts nodes from the first one of its own graph."""

import torch
from torch import nn

import truebatch as tb

draw = torch.Generator().manual_seed(0)
samples = [
    {
        "nodes": torch.randn(n, 5, generator=draw),
        "edges": torch.randint(0, n, (m, 2), generator=draw),
        "energy": float(n),
    }
    for n, m in ((3, 4), (9, 20), (2, 1), (6, 0), (12, 30), (4, 7))
]
fields = [
    tb.Field(name="nodes", kind="flat", axis="nodes"),
    tb.Field(name="edges", kind="flat", axis="edges"),
    tb.Field(name="energy", kind="once", dtype="float32"),
]


class GraphNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(5, 16), nn.Linear(16, 1)
        self.messages = nn.ModuleList(nn.Sequential(nn.Linear(32, 16), nn.SiLU()) for _ in range(2))

    def forward(self, batch):
        nodes, edges = batch.flat("nodes"), batch.flat("edges")
        first = nodes.starts[edges.owner]  # [m] the place of the first node of each edge's graph
        sender, receiver = (batch["edges"] + first[:, None]).unbind(1)
        hidden = self.embed(batch["nodes"])  # [n, D]
        for message in self.messages:
            sent = message(torch.cat([hidden[sender], hidden[receiver]], -1))
            hidden = hidden + torch.zeros_like(hidden).index_add(0, receiver, sent)
        graphs = hidden.new_zeros(batch.num_samples, hidden.shape[1]).index_add(0, nodes.owner, hidden)
        return self.head(graphs)[:, 0]  # [N]


class SquaredError:
    def counts(self, batch):
        return {"error": batch.num_samples}

    def sums(self, model, batch):
        return {"error": (model(batch) - batch["energy"]).square().sum()}


if __name__ == "__main__":
    torch.manual_seed(0)
    print(tb.assert_batchable(GraphNetwork(), SquaredError(), samples, fields))
    data = tb.TrainData(samples=samples, fields=fields)
    print(tb.train(GraphNetwork(), SquaredError(), data, tb.TrainConfig(samples_per_step=3)).records[-1]["loss"])
