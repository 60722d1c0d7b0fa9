"""DICOM files and NIfTI volumes made for a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nibabel
import numpy as np
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian, SecondaryCaptureImageStorage, generate_uid

NAME = "Quixote^Alonso"


def dicom(path: Path, values: np.ndarray, patient: str | None = "MRN-4711", **tags: Any) -> Path:
    """One grey or RGB picture; ``tags`` are set last, None removes one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    meta = FileMetaDataset()
    meta.TransferSyntaxUID = tags.pop("syntax", ExplicitVRLittleEndian)
    meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID = SecondaryCaptureImageStorage, generate_uid()
    made = Dataset()
    made.file_meta = meta
    made.SOPClassUID, made.SOPInstanceUID = meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID
    made.Rows, made.Columns = values.shape[:2]
    made.SamplesPerPixel = 1 if values.ndim == 2 else 3
    made.PhotometricInterpretation = "MONOCHROME2" if values.ndim == 2 else "RGB"
    if values.ndim == 3:
        made.PlanarConfiguration = 0
    made.BitsAllocated = made.BitsStored = 8 * values.itemsize
    made.HighBit = made.BitsStored - 1
    made.PixelRepresentation = int(values.dtype.kind == "i")
    made.PixelData = np.ascontiguousarray(values).tobytes()
    made.PatientName, made.InstitutionName, made.StudyInstanceUID = NAME, "La Mancha General", generate_uid()
    if patient is not None:
        made.PatientID = patient
    for name, value in tags.items():
        if value is None:
            delattr(made, name)
        else:
            setattr(made, name, value)
    made.save_as(path, enforce_file_format=True)
    return path


def nifti(path: Path, values: np.ndarray, affine: np.ndarray | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.Nifti1Image(values, np.eye(4) if affine is None else affine).to_filename(path)
    return path
