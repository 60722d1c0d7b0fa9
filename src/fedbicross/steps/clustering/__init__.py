"""Which clients belong together: FedBiCross stage 1, the rivals of its Fig. 2, and a choice of K from uploads alone."""

from fedbicross.steps.clustering.agreement import ClusterAgreement, cluster_agreement, pairwise_kl, soft_label_entropy
from fedbicross.steps.clustering.count import ChosenK, choose_k
from fedbicross.steps.clustering.kmeans import centroids, cluster, kmeans_parameters, prediction_matrix
from fedbicross.steps.clustering.linkage import agglomerate, hierarchical_updates
from fedbicross.steps.clustering.partition import Clustering, canonical_labels
from fedbicross.steps.clustering.subspaces import pacfl, principal_angles, subspace_signature

__all__ = [
    "ChosenK",
    "ClusterAgreement",
    "Clustering",
    "agglomerate",
    "canonical_labels",
    "centroids",
    "choose_k",
    "cluster",
    "cluster_agreement",
    "hierarchical_updates",
    "kmeans_parameters",
    "pacfl",
    "pairwise_kl",
    "prediction_matrix",
    "principal_angles",
    "soft_label_entropy",
    "subspace_signature",
]
