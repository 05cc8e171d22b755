/* Decodes the part of a JPEG that a training view shows, resizes it and mirrors it: the pixels of vit/input/augment.py, bit for
 * bit, without decoding what the view does not show.
 *
 * Rows above the box are entropy-decoded only, rows below it not at all, and columns beside it are not transformed. The resize is
 * the antialiased bilinear one of torch for uint8: two passes, columns first, with 16-bit weights, each rounded to uint8.
 *
 * The bytes come from strangers. libjpeg reports an error by a call that must not return: it jumps back to the caller here, which
 * then answers False, as for every warning and every unusual file. The caller decodes those files whole, and decides.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jpeglib.h>

#if !defined(LIBJPEG_TURBO_VERSION_NUMBER) || LIBJPEG_TURBO_VERSION_NUMBER < 2000000
#error "vitline-native needs the headers of libjpeg-turbo 2.0 or newer; other libjpegs cannot skip what a view does not show"
#endif
#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define HAVE_AVX2 1
#endif

enum {
    CHANNELS = 4,       /* bytes of a pixel in here: red, green, blue and one that no one reads */
    MAX_SIZE = 4096,    /* longest side of a view */
    LONGEST_SIDE = 65535, /* of a JPEG */
    ROWS_AT_ONCE = 2,   /* rows that the kernels resize at a time */
    TAPS_AT_ONCE = 4,   /* weights that the kernels use at a time; shorter lists end in zeros */
    PIXELS_AT_ONCE = 8, /* pixels that the vertical kernel makes at a time */
};

/* The weights of one axis: output i is the sum of weights[i * stride + t] * input[first[i] + t], t < count[i]. */
typedef struct {
    int *first, *count;
    int16_t *weights;
    int stride, precision;
} Axis;

typedef struct {
    int top, left, height, width;
} Box;

typedef struct {
    struct jpeg_error_mgr base;
    jmp_buf give_up;
} Errors;

/* All memory of a view. libjpeg jumps out of its functions, so that nothing may be owned by local variables. */
typedef struct {
    struct jpeg_decompress_struct jpeg;
    Errors errors;
    Axis across, down;
    double *unrounded;     /* weights of one axis before they are rounded */
    uint8_t *lines;        /* ROWS_AT_ONCE decoded rows */
    uint8_t *resized;      /* a ring of rows that were resized across */
    uint8_t *row;          /* one row of the view */
    const uint8_t **taken; /* the rows of the ring that one row of the view needs */
} Work;

static void on_error(j_common_ptr jpeg) { longjmp(((Errors *)jpeg->err)->give_up, 1); }

static void on_message(j_common_ptr jpeg, int level) {
    if (level < 0) on_error(jpeg); /* a warning: data are damaged */
}

static void begin(Work *work, const Py_buffer *data) {
    struct jpeg_decompress_struct *jpeg = &work->jpeg;
    jpeg->err = jpeg_std_error(&work->errors.base);
    work->errors.base.error_exit = on_error;
    work->errors.base.emit_message = on_message;
    jpeg_create_decompress(jpeg);
    jpeg_mem_src(jpeg, data->buf, (unsigned long)data->len);
}

/* Whether the file is of the common kind that is decoded here. The caller has read the header. */
static int is_common(const struct jpeg_decompress_struct *jpeg) {
    const jpeg_component_info *part = jpeg->comp_info;
    if (jpeg->progressive_mode || jpeg->arith_code || jpeg->data_precision != 8) return 0;
    if (jpeg->comps_in_scan != jpeg->num_components) return 0;
    if (jpeg->num_components == 1) return jpeg->jpeg_color_space == JCS_GRAYSCALE;
    if (jpeg->num_components != 3) return 0;
    if (jpeg->jpeg_color_space != JCS_YCbCr && jpeg->jpeg_color_space != JCS_RGB) return 0;
    for (int i = 1; i < 3; i++)
        if (part[i].h_samp_factor != 1 || part[i].v_samp_factor != 1) return 0;
    return part[0].h_samp_factor <= 2 && part[0].v_samp_factor <= 2;
}

/* ---- the resize ---- */

static int taps_of(int input, int output) {
    double scale = (double)input / output;
    int taps = (int)ceil(scale >= 1 ? scale : 1) * 2 + 1;
    return (taps + TAPS_AT_ONCE - 1) / TAPS_AT_ONCE * TAPS_AT_ONCE;
}

/* The weights of torch.nn.functional.interpolate for uint8: a triangle, cut at the edges, in doubles whose operations have torch's
 * order; then rounded to the largest number of bits with which the largest weight still fits 16 bits. Outside of `input`, nothing
 * has a weight other than zero. Returns whether there was memory. */
static int make_axis(Axis *axis, double **unrounded, int input, int output) {
    double scale = (double)input / output, support = scale >= 1 ? scale : 1, inverse = scale >= 1 ? 1 / scale : 1;
    int max_taps = (int)ceil(support) * 2 + 1;
    double largest = 0;
    axis->stride = taps_of(input, output);
    axis->first = malloc(sizeof(int) * output);
    axis->count = malloc(sizeof(int) * output);
    axis->weights = calloc((size_t)output * axis->stride, sizeof(int16_t));
    *unrounded = calloc((size_t)output * axis->stride, sizeof(double));
    if (!axis->first || !axis->count || !axis->weights || !*unrounded) return 0;
    for (int i = 0; i < output; i++) {
        double center = scale * (i + 0.5), total = 0, *weight = *unrounded + (size_t)i * axis->stride;
        int64_t first = (int64_t)(center - support + 0.5), end = (int64_t)(center + support + 0.5);
        first = first < 0 ? 0 : first;
        end = end > input ? input : end;
        int64_t count = end - first > max_taps ? max_taps : end - first < 0 ? 0 : end - first;
        for (int64_t t = 0; t < count; t++) {
            double x = fabs((t + first - center + 0.5) * inverse);
            total += weight[t] = x < 1 ? 1 - x : 0;
        }
        for (int64_t t = 0; t < count; t++) {
            if (total != 0) weight[t] /= total;
            if (weight[t] > largest) largest = weight[t];
        }
        axis->first[i] = (int)first;
        axis->count[i] = (int)count;
    }
    axis->precision = 0;
    while (axis->precision < 22 && (int)(0.5 + largest * (1 << (axis->precision + 1))) < 1 << 15) axis->precision++;
    for (size_t i = 0; i < (size_t)output * axis->stride; i++)
        axis->weights[i] = (int16_t)(0.5 + (*unrounded)[i] * (1 << axis->precision));
    free(*unrounded);
    *unrounded = NULL;
    return 1;
}

static uint8_t rounded(int sum, int precision) {
    sum >>= precision;
    return (uint8_t)(sum < 0 ? 0 : sum > 255 ? 255 : sum);
}

/* Resizes two decoded rows across. They begin at the left edge of the box. */
static void resize_across(const Axis *axis, int size, const uint8_t *const in[2], uint8_t *const out[2]) {
    for (int row = 0; row < ROWS_AT_ONCE; row++)
        for (int i = 0; i < size; i++)
            for (int c = 0; c < CHANNELS; c++) {
                int sum = 1 << (axis->precision - 1);
                const uint8_t *from = in[row] + (size_t)axis->first[i] * CHANNELS + c;
                for (int t = 0; t < axis->count[i]; t++) sum += axis->weights[i * axis->stride + t] * from[t * CHANNELS];
                out[row][i * CHANNELS + c] = rounded(sum, axis->precision);
            }
}

/* One row of the view, from the rows that it needs. */
static void resize_down(const int16_t *weights, int count, int precision, int size, const uint8_t **rows, uint8_t *out) {
    for (int i = 0; i < size * CHANNELS; i++) {
        int sum = 1 << (precision - 1);
        for (int t = 0; t < count; t++) sum += weights[t] * rows[t][i];
        out[i] = rounded(sum, precision);
    }
}

static void write_row(const uint8_t *row, int size, int mirror, uint8_t *out) {
    for (int i = 0; i < size; i++) memcpy(out + 3 * (mirror ? size - 1 - i : i), row + CHANNELS * i, 3);
}

#ifdef HAVE_AVX2
__attribute__((target("avx2"))) static void resize_across_avx2(
    const Axis *axis, int size, const uint8_t *const in[2], uint8_t *const out[2]) {
    /* Bytes of two neighbouring pixels -> pairs of 16-bit numbers, one pair a channel. */
    const __m256i first_two = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, -1, 4, -1, 1, -1, 5, -1, 2, -1, 6, -1, 3, -1, 7, -1));
    const __m256i last_two = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(8, -1, 12, -1, 9, -1, 13, -1, 10, -1, 14, -1, 11, -1, 15, -1));
    const __m256i half = _mm256_set1_epi32(1 << (axis->precision - 1));
    const __m128i shift = _mm_cvtsi32_si128(axis->precision);
    for (int i = 0; i < size; i++) {
        const int16_t *weights = axis->weights + (size_t)i * axis->stride;
        const size_t first = (size_t)axis->first[i] * CHANNELS;
        __m256i sum = half;
        for (int t = 0; t < axis->count[i]; t += TAPS_AT_ONCE) {
            int32_t pair[2];
            memcpy(pair, weights + t, sizeof pair);
            __m256i four = _mm256_inserti128_si256(
                _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)(in[0] + first + t * CHANNELS))),
                _mm_loadu_si128((const __m128i *)(in[1] + first + t * CHANNELS)), 1);
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_shuffle_epi8(four, first_two), _mm256_set1_epi32(pair[0])));
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_shuffle_epi8(four, last_two), _mm256_set1_epi32(pair[1])));
        }
        sum = _mm256_sra_epi32(sum, shift);
        sum = _mm256_packs_epi32(sum, sum);
        sum = _mm256_packus_epi16(sum, sum);
        int32_t pixel[2] = {_mm256_extract_epi32(sum, 0), _mm256_extract_epi32(sum, 4)};
        memcpy(out[0] + i * CHANNELS, &pixel[0], CHANNELS);
        memcpy(out[1] + i * CHANNELS, &pixel[1], CHANNELS);
    }
}

/* `rows` has an even number of rows; the weight of one that is there to make it even is zero. */
__attribute__((target("avx2"))) static void resize_down_avx2(
    const int16_t *weights, int count, int precision, int size, const uint8_t **rows, uint8_t *out) {
    const __m256i zero = _mm256_setzero_si256(), half = _mm256_set1_epi32(1 << (precision - 1));
    const __m128i shift = _mm_cvtsi32_si128(precision);
    for (int i = 0; i < size * CHANNELS; i += PIXELS_AT_ONCE * CHANNELS) {
        __m256i sum[4] = {half, half, half, half};
        for (int t = 0; t < count; t += 2) {
            int32_t pair;
            memcpy(&pair, weights + t, sizeof pair);
            const __m256i both = _mm256_set1_epi32(pair);
            const __m256i one = _mm256_loadu_si256((const __m256i *)(rows[t] + i));
            const __m256i other = _mm256_loadu_si256((const __m256i *)(rows[t + 1] + i));
            const __m256i low = _mm256_unpacklo_epi8(one, other), high = _mm256_unpackhi_epi8(one, other);
            sum[0] = _mm256_add_epi32(sum[0], _mm256_madd_epi16(_mm256_unpacklo_epi8(low, zero), both));
            sum[1] = _mm256_add_epi32(sum[1], _mm256_madd_epi16(_mm256_unpackhi_epi8(low, zero), both));
            sum[2] = _mm256_add_epi32(sum[2], _mm256_madd_epi16(_mm256_unpacklo_epi8(high, zero), both));
            sum[3] = _mm256_add_epi32(sum[3], _mm256_madd_epi16(_mm256_unpackhi_epi8(high, zero), both));
        }
        for (int j = 0; j < 4; j++) sum[j] = _mm256_sra_epi32(sum[j], shift);
        const __m256i pixels = _mm256_packus_epi16(_mm256_packs_epi32(sum[0], sum[1]), _mm256_packs_epi32(sum[2], sum[3]));
        _mm256_storeu_si256((__m256i *)(out + i), pixels);
    }
}

__attribute__((target("avx2"))) static void write_row_avx2(const uint8_t *row, int size, int mirror, uint8_t *out) {
    const __m128i order = mirror ? _mm_setr_epi8(12, 13, 14, 8, 9, 10, 4, 5, 6, 0, 1, 2, -1, -1, -1, -1)
                                 : _mm_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1);
    int i = 0;
    for (; i + 4 <= size; i += 4) {
        const __m128i four = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(row + i * CHANNELS)), order);
        uint8_t *to = out + 3 * (mirror ? size - 4 - i : i);
        const int32_t rest = _mm_extract_epi32(four, 2);
        _mm_storel_epi64((__m128i *)to, four);
        memcpy(to + 8, &rest, 4);
    }
    for (; i < size; i++) memcpy(out + 3 * (mirror ? size - 1 - i : i), row + CHANNELS * i, 3);
}
#endif

static struct {
    void (*across)(const Axis *, int, const uint8_t *const[2], uint8_t *const[2]);
    void (*down)(const int16_t *, int, int, int, const uint8_t **, uint8_t *);
    void (*write)(const uint8_t *, int, int, uint8_t *);
} kernels = {resize_across, resize_down, write_row};

/* ---- the view ---- */

/* Whether the rest of the compressed data, which nobody decodes, is a scan that ends where the image ends. */
static int ends_well(const struct jpeg_decompress_struct *jpeg) {
    const uint8_t *at = jpeg->src->next_input_byte, *end = at + jpeg->src->bytes_in_buffer;
    if (jpeg->unread_marker == JPEG_EOI) return 1;
    if (jpeg->unread_marker != 0 && (jpeg->unread_marker < JPEG_RST0 || jpeg->unread_marker >= JPEG_RST0 + 8)) return 0;
    while ((at = memchr(at, 0xFF, end - at)) != NULL && ++at < end) {
        if (*at == JPEG_EOI) return 1;
        if (*at >= JPEG_RST0 && *at < JPEG_RST0 + 8 && jpeg->restart_interval) continue;
        if (*at != 0 && *at != 0xFF) return 0;
    }
    return 0;
}

static void read_line(struct jpeg_decompress_struct *jpeg, uint8_t *line) {
    JSAMPROW lines[1] = {line};
    if (jpeg_read_scanlines(jpeg, lines, 1) != 1) on_error((j_common_ptr)jpeg);
}

/* Restricts decoding to the columns of the box and some beside it, and to the rows from its top on. Returns the column of the
 * first pixel of the lines. Beside a cut, chroma is interpolated as beside the edge of an image: the pixels next to it differ. */
static int restrict_to(struct jpeg_decompress_struct *jpeg, const Box *box) {
    const int margin = jpeg->max_h_samp_factor * DCTSIZE, full = (int)jpeg->output_width;
    const int start = box->left > margin ? box->left - margin : 0;
    const int end = full - box->left - box->width > margin ? box->left + box->width + margin : full;
    JDIMENSION from = (JDIMENSION)start, width = (JDIMENSION)(end - start);
    if (width < jpeg->output_width) jpeg_crop_scanline(jpeg, &from, &width);
    if (box->top > 0 && jpeg_skip_scanlines(jpeg, (JDIMENSION)box->top) != (JDIMENSION)box->top)
        on_error((j_common_ptr)jpeg);
    return (int)from;
}

/* Decodes and resizes the box. Does not return where libjpeg finds fault. Returns whether the view was made. */
static int fill_view(Work *work, const Box *box, int size, int mirror, uint8_t *out) {
    struct jpeg_decompress_struct *jpeg = &work->jpeg;
    jpeg_read_header(jpeg, TRUE);
    if (!is_common(jpeg)) return 0;
    if (box->top > (int)jpeg->image_height - box->height || box->left > (int)jpeg->image_width - box->width) return 0;
    jpeg->out_color_space = JCS_EXT_RGBX;
    jpeg->dct_method = JDCT_ISLOW;
    jpeg_start_decompress(jpeg);

    /* Kernels read whole groups of taps and of pixels: the buffers are a little larger than the pixels in them. */
    const size_t line_bytes = ((size_t)jpeg->output_width + 2 * TAPS_AT_ONCE) * CHANNELS;
    const size_t ring_bytes = ((size_t)size + PIXELS_AT_ONCE) * CHANNELS;
    const int ring = taps_of(box->height, size) + ROWS_AT_ONCE;
    if (!make_axis(&work->across, &work->unrounded, box->width, size)) return 0;
    if (!make_axis(&work->down, &work->unrounded, box->height, size)) return 0;
    work->lines = calloc(ROWS_AT_ONCE, line_bytes);
    work->resized = calloc(ring, ring_bytes);
    work->row = calloc(1, ring_bytes);
    work->taken = calloc(ring, sizeof(uint8_t *));
    if (!work->lines || !work->resized || !work->row || !work->taken) return 0;

    const Axis *down = &work->down;
    const int shift = (box->left - restrict_to(jpeg, box)) * CHANNELS;
    const uint8_t *const in[2] = {work->lines + shift, work->lines + line_bytes + shift};
    int made = 0;
    for (int rows = 0; rows < box->height; rows += ROWS_AT_ONCE) {
        uint8_t *const to[2] = {work->resized + rows % ring * ring_bytes, work->resized + (rows + 1) % ring * ring_bytes};
        const int here = box->height - rows < ROWS_AT_ONCE ? box->height - rows : ROWS_AT_ONCE;
        for (int i = 0; i < here; i++) read_line(jpeg, work->lines + i * line_bytes);
        kernels.across(&work->across, size, in, to);
        for (; made < size && down->first[made] + down->count[made] <= rows + here; made++) {
            const int count = down->count[made];
            for (int t = 0; t < count + count % 2; t++)
                work->taken[t] = work->resized + (down->first[made] + t) % ring * ring_bytes;
            kernels.down(down->weights + (size_t)made * down->stride, count, down->precision, size, work->taken, work->row);
            kernels.write(work->row, size, mirror, out + (size_t)made * size * 3);
        }
    }
    if (jpeg->input_iMCU_row < jpeg->total_iMCU_rows) return ends_well(jpeg);
    while (jpeg->output_scanline < jpeg->output_height) read_line(jpeg, work->lines);
    jpeg_finish_decompress(jpeg);
    return 1;
}

static void end(Work *work) {
    jpeg_destroy_decompress(&work->jpeg);
    free(work->across.first);
    free(work->across.count);
    free(work->across.weights);
    free(work->down.first);
    free(work->down.count);
    free(work->down.weights);
    free(work->unrounded);
    free(work->lines);
    free(work->resized);
    free(work->row);
    free(work->taken);
    free(work);
}

static int try_view(Work *work, const Py_buffer *data, const Box *box, int size, int mirror, uint8_t *out) {
    if (setjmp(work->errors.give_up)) return 0;
    begin(work, data);
    return fill_view(work, box, size, mirror, out);
}

static int try_size(Work *work, const Py_buffer *data) {
    if (setjmp(work->errors.give_up)) return 0;
    begin(work, data);
    jpeg_read_header(&work->jpeg, TRUE);
    return is_common(&work->jpeg);
}

PyDoc_STRVAR(size_doc,
    "size(data) -> (height, width) of a JPEG of the common kind: 8 bits, Huffman coded, in one scan, grey or 4:4:4, 4:2:2, 4:2:0 or\n"
    "4:4:0. None for any other file.");

static PyObject *size(PyObject *module, PyObject *arg) {
    Py_buffer data;
    (void)module;
    if (PyObject_GetBuffer(arg, &data, PyBUF_SIMPLE) < 0) return NULL;
    Work *work = calloc(1, sizeof *work);
    PyObject *found = NULL;
    if (work == NULL) {
        PyErr_NoMemory();
    } else {
        found = try_size(work, &data) ? Py_BuildValue("II", work->jpeg.image_height, work->jpeg.image_width)
                                      : Py_NewRef(Py_None);
        end(work);
    }
    PyBuffer_Release(&data);
    return found;
}

PyDoc_STRVAR(view_doc,
    "view(data, top, left, height, width, out, size, mirror) -> bool. Writes that box of a JPEG, resized to a square, into `out`, a\n"
    "contiguous uint8 buffer of size * size * 3 bytes, and mirrored if asked. False if the file is not of the common kind or if any\n"
    "fault was found on the way; `out` has no meaning then. Data below the box are not decoded. Releases the GIL.");

static PyObject *view(PyObject *module, PyObject *args) {
    Py_buffer data, out;
    Box box;
    int side, mirror, made = -1;
    (void)module;
    if (!PyArg_ParseTuple(
            args, "y*iiiiw*ip", &data, &box.top, &box.left, &box.height, &box.width, &out, &side, &mirror))
        return NULL;
    if (box.top < 0 || box.left < 0 || box.height < 1 || box.width < 1 || box.top > LONGEST_SIDE || box.left > LONGEST_SIDE ||
        box.height > LONGEST_SIDE || box.width > LONGEST_SIDE) {
        PyErr_Format(PyExc_ValueError, "the box %d x %d at (%d, %d) is no part of an image", box.width, box.height, box.left, box.top);
    } else if (side < 1 || side > MAX_SIZE || out.len != (Py_ssize_t)side * side * 3) {
        PyErr_Format(PyExc_ValueError, "a view of size %d (1 to %d) does not fit %zd bytes", side, MAX_SIZE, out.len);
    } else {
        Work *work = calloc(1, sizeof *work);
        if (work == NULL) {
            PyErr_NoMemory();
        } else {
            Py_BEGIN_ALLOW_THREADS
            made = try_view(work, &data, &box, side, mirror, out.buf);
            end(work);
            Py_END_ALLOW_THREADS
        }
    }
    PyBuffer_Release(&data);
    PyBuffer_Release(&out);
    return made < 0 ? NULL : PyBool_FromLong(made);
}

static PyMethodDef methods[] = {
    {"size", size, METH_O, size_doc}, {"view", view, METH_VARARGS, view_doc}, {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "vitline_native", "Decoding of training views, without what they do not show.", 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_vitline_native(void) {
#ifdef HAVE_AVX2
    if (__builtin_cpu_supports("avx2")) {
        kernels.across = resize_across_avx2;
        kernels.down = resize_down_avx2;
        kernels.write = write_row_avx2;
    }
#endif
    return PyModule_Create(&module);
}
